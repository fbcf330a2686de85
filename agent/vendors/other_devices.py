"""Non-GPU devices on the host, treated as a vendor without GPUs. Machines' settings name the devices or their nodes.

A new device class is a name in agent.config.settings and in agent.model.device, its rules and advice here, and a row in
docs/hardware/devices.md. Its tests say if one is missing.
"""

import posixpath
import re
from collections.abc import Collection, Mapping, Set
from fnmatch import fnmatchcase

from msgspec import Struct

from agent.config.settings import MachineSettings
from agent.model.device import DeviceKind
from agent.model.facts import DeviceNode, Gpu, Unseen, VendorFacts
from agent.model.goal import DriverRoots, Grant
from agent.model.handoff import OTHER_DEVICES
from agent.system.trust import classify_error, entries_if_present
from agent.vendors.host_vendor import PROC_DEVICES, HostVendor, Sources, names_by_major, parse_misc, usable_number

# Fixed numbers are from include/linux/miscdevice.h. All others are from /proc/misc or /proc/devices (proc(5)).
PROC_MISC = "/proc/misc"
MISC_MAJOR = 10
"""Major of the kernel's miscellaneous devices (include/uapi/linux/major.h)."""
ANY_MAJOR = range(1 << 12)
GPU_DRIVERS = ("nvidia*", "drm", "kfd")
"""Patterns (fnmatch) of GPU drivers' names in /proc/devices. Nodes of these drivers cannot be requested by path."""


class Rule(Struct, frozen=True):
    """Describes the nodes of one driver. Exactly one of `minor`, `misc` and `registered` is set."""

    kind: DeviceKind
    """Also the name of the device class in the setting `devices`."""
    pattern: str
    """Pattern (re) of the nodes' names in `directory`."""
    minor: int | None = None
    """The fixed minor number of a miscellaneous device. The module need not be loaded: opening the node loads it."""
    misc: str = ""
    """The name in /proc/misc of a miscellaneous device without a fixed number."""
    registered: str = ""
    """The driver's name in /proc/devices, for any other device."""
    directory: str = "/dev"


RULES = (
    Rule(DeviceKind.KVM, "kvm", 232),
    Rule(DeviceKind.TUN, "tun", 200, directory="/dev/net"),
    Rule(DeviceKind.VHOST, "vhost-net", 238),
    Rule(DeviceKind.VHOST, "vhost-vsock", 241),
    Rule(DeviceKind.INFINIBAND, "uverbs[0-9]+", registered="infiniband_verbs", directory="/dev/infiniband"),
    Rule(DeviceKind.INFINIBAND, "rdma_cm", misc="rdma_cm", directory="/dev/infiniband"),
    Rule(DeviceKind.GDRCOPY, "gdrdrv", registered="gdrdrv"),
    Rule(DeviceKind.NVIDIA_FS, "nvidia-fs[0-9]+", registered="nvidia-fs"),
    Rule(DeviceKind.ACCEL, "accel[0-9]+", registered="accel", directory="/dev/accel"),
)
ADVICE = {
    DeviceKind.KVM: "load the module kvm_intel or kvm_amd",
    DeviceKind.TUN: "load the module tun",
    DeviceKind.VHOST: "load the modules vhost_net and vhost_vsock",
    DeviceKind.INFINIBAND: "load the modules ib_uverbs and rdma_ucm, and the adapter's",
    DeviceKind.GDRCOPY: "load the module gdrdrv and create its node, as GDRCopy's package does",
    DeviceKind.NVIDIA_FS: "load the module nvidia_fs",
    DeviceKind.ACCEL: "load the accelerator's module, such as intel_vpu or amdxdna",
}
"""How to make the nodes of a class appear."""
NODE_DIRECTORIES = tuple(dict.fromkeys(rule.directory for rule in RULES if rule.directory != "/dev"))
NODE_NAMES = (
    *(rule.pattern.replace("[0-9]+", "*") for rule in RULES if rule.directory == "/dev"),
    *(posixpath.basename(directory) for directory in NODE_DIRECTORIES),
)
"""Patterns (fnmatch) of names directly in /dev: of the nodes, and of the directories of nodes."""


def observe_others(sources: Sources) -> VendorFacts:
    """Return the facts about the devices that machines request. If no machine requests any, nothing is read."""
    system = sources.system
    kinds = {name for each in sources.machines.values() for name in each.devices}
    paths = {device.path for each in sources.machines.values() for device in each.extra_devices}
    if not kinds and not paths:
        return VendorFacts(OTHER_DEVICES)
    nodes: dict[str, DeviceNode] = {}
    problems: dict[str, str] = {}
    try:
        registered = names_by_major(system.read_text(PROC_DEVICES))
        misc = parse_misc(system.read_text(PROC_MISC)) if system.exists(PROC_MISC) else {}
        candidates = [
            (f"{rule.directory}/{name}", rule)
            for rule in RULES
            if rule.kind in kinds
            for name in entries_if_present(system, rule.directory)
            if re.fullmatch(rule.pattern, name)
        ]
        for path, rule in candidates:
            majors, minor, where = _numbers(rule, registered, misc)
            if number := usable_number(system, path, majors, minor, where, problems):
                nodes[path] = DeviceNode(path, rule.kind, number)
        for path in sorted(paths - nodes.keys()):
            number = usable_number(system, path, ANY_MAJOR, None, "", problems)
            drivers = sorted(registered.get(number.major, ())) if number else []
            gpus = [driver for driver in drivers if any(fnmatchcase(driver, pattern) for pattern in GPU_DRIVERS)]
            if gpus:
                why = f"belongs to driver {gpus[0]}; use `gpus` or `devices` for this driver's devices"
                problems[path] = f"{path}: {why}"
            elif number:
                nodes[path] = DeviceNode(path, DeviceKind.EXTRA, number)
    except OSError as error:
        return VendorFacts(OTHER_DEVICES, devices=Unseen(classify_error(error.filename or PROC_DEVICES, error).why))
    return VendorFacts(OTHER_DEVICES, devices=tuple(sorted(nodes.values())), node_problems=problems)


def _numbers(
    rule: Rule, registered: Mapping[int, Set[str]], misc: Mapping[str, int]
) -> tuple[Collection[int], int | None, str]:
    """Return the majors, the minor (None for any), and where they are listed, of a rule's nodes."""
    if rule.registered:
        majors = [major for major, names in registered.items() if rule.registered in names]
        return majors, None, f"{rule.registered} is not in {PROC_DEVICES}"
    minor = misc.get(rule.misc) if rule.misc else rule.minor
    return () if minor is None else (MISC_MAJOR,), minor, f"{rule.misc} is not in {PROC_MISC}"


def grant_others(facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]) -> Grant:
    """Grant the nodes that this machine's settings request, and list the missing ones."""
    paths = tuple(each.path for each in settings.extra_devices)
    found = facts.devices if isinstance(facts.devices, tuple) else ()
    nodes = {node.path: node for node in found if node.kind in settings.devices or node.path in paths}
    kinds = {node.kind for node in nodes.values()}
    return Grant(
        vendor=facts.vendor,
        nodes=tuple(sorted(nodes.values())),
        driver_files=False,
        missing=(
            *(f'devices "{each}" ({ADVICE[DeviceKind(each)]})' for each in settings.devices if each not in kinds),
            *(facts.node_problems.get(path, path) for path in paths if path not in nodes),
        ),
    )


OTHER = HostVendor(
    name=OTHER_DEVICES,
    observe=observe_others,
    grant=grant_others,
    in_every_handoff=True,
    node_names=NODE_NAMES,
    node_directories=NODE_DIRECTORIES,
)
"""The vendor of non-GPU devices. It has no conditions; agent.host.verify.readiness mentions missing devices."""
