"""Non-GPU devices on the host, treated as a vendor without GPUs. Machines' settings name the devices or their nodes."""

import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from msgspec import Struct

from agent.config.settings import MachineSettings
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import Broken, DeviceNode, Gpu, Unseen, VendorFacts
from agent.model.goal import DriverRoots, Grant
from agent.model.handoff import OTHER_DEVICES
from agent.system.files import System
from agent.system.trust import classify_error, entries_if_present
from agent.vendors.host_vendor import PROC_DEVICES, HostVendor, Sources, names_by_major, parse_misc

# Fixed numbers are from include/linux/miscdevice.h. All others are from /proc/misc or /proc/devices (proc(5)).
PROC_MISC = "/proc/misc"
MISC_MAJOR = 10
"""Major of the kernel's miscellaneous devices (include/uapi/linux/major.h)."""
GPU_DRIVERS = ("nvidia*", "drm", "kfd")
"""Patterns (fnmatch) of GPU drivers' names in /proc/devices. Nodes of these drivers cannot be requested by path."""


class Rule(Struct, frozen=True):
    """Describes the nodes of one driver. Exactly one of `minor`, `misc` and `registered` is set."""

    pattern: str
    """Pattern (re) of the nodes' names in `directory`."""
    minor: int | None = None
    """The fixed minor number of a miscellaneous device. The module need not be loaded: opening the node loads it."""
    misc: str = ""
    """The name in /proc/misc of a miscellaneous device without a fixed number."""
    registered: str = ""
    """The driver's name in /proc/devices, for any other device."""
    directory: str = "/dev"


class DeviceClass(Struct, frozen=True):
    """The devices that one name in the setting `devices` stands for."""

    kind: DeviceKind
    rules: tuple[Rule, ...]
    advice: str
    """How to make the nodes appear."""


DEVICE_CLASSES = (
    DeviceClass(DeviceKind.KVM, (Rule("kvm", 232),), "load the module kvm_intel or kvm_amd"),
    DeviceClass(DeviceKind.TUN, (Rule("tun", 200, directory="/dev/net"),), "load the module tun"),
    DeviceClass(
        DeviceKind.VHOST,
        (Rule("vhost-net", 238), Rule("vhost-vsock", 241)),
        "load the modules vhost_net and vhost_vsock",
    ),
    DeviceClass(
        DeviceKind.INFINIBAND,
        (
            Rule("uverbs[0-9]+", registered="infiniband_verbs", directory="/dev/infiniband"),
            Rule("rdma_cm", misc="rdma_cm", directory="/dev/infiniband"),
        ),
        "load the modules ib_uverbs and rdma_ucm, and the adapter's",
    ),
    DeviceClass(
        DeviceKind.GDRCOPY,
        (Rule("gdrdrv", registered="gdrdrv"),),
        "load the module gdrdrv and create its node, as GDRCopy's package does",
    ),
    DeviceClass(
        DeviceKind.NVIDIA_FS,
        (Rule("nvidia-fs[0-9]+", registered="nvidia-fs"),),
        "load the module nvidia_fs",
    ),
    DeviceClass(
        DeviceKind.ACCEL,
        (Rule("accel[0-9]+", registered="accel", directory="/dev/accel"),),
        "load the accelerator's module, such as intel_vpu or amdxdna",
    ),
)
RULES = tuple(rule for each in DEVICE_CLASSES for rule in each.rules)
NODE_DIRECTORIES = tuple(dict.fromkeys(rule.directory for rule in RULES if rule.directory != "/dev"))
NODE_NAMES = (
    *(rule.pattern.replace("[0-9]+", "*") for rule in RULES if rule.directory == "/dev"),
    *(posixpath.basename(directory) for directory in NODE_DIRECTORIES),
)
"""Patterns (fnmatch) of names directly in /dev: of the nodes, and of the directories of nodes."""


def device_class(name: str) -> DeviceClass:
    """Return the device class of this name. Raises KeyError."""
    return {str(each.kind): each for each in DEVICE_CLASSES}[name]


class NodeChecker:
    """Checks nodes one by one and collects problems. Raises OSError if a node cannot be observed."""

    def __init__(self, system: System) -> None:
        self.problems: dict[str, str] = {}
        """Why each node must not be used, by path."""
        self._system = system
        self._registered = names_by_major(system.read_text(PROC_DEVICES))
        self._misc = parse_misc(system.read_text(PROC_MISC)) if system.exists(PROC_MISC) else {}

    def class_nodes(self, wanted: DeviceClass) -> Iterator[DeviceNode]:
        """Yield the usable nodes of a class. Those that must not be used are added to `problems`."""
        for rule in wanted.rules:
            for name in entries_if_present(self._system, rule.directory):
                path = f"{rule.directory}/{name}"
                number = self._number(path) if re.fullmatch(rule.pattern, name) else None
                if number and self._fits(path, number, rule):
                    yield DeviceNode(path, wanted.kind, number)

    def named_node(self, path: str) -> DeviceNode | None:
        """Return the node at a path from the settings; None if it is missing or must not be used.

        If the node must not be used, the reason is added to `problems`.
        """
        number = self._number(path)
        if number is None:
            return None
        for driver in sorted(self._registered.get(number.major, ())):
            if any(fnmatchcase(driver, pattern) for pattern in GPU_DRIVERS):
                why = f"belongs to driver {driver}; use `gpus` or `devices` for this driver's devices"
                self.problems[path] = f"{path}: {why}"
                return None
        return DeviceNode(path, DeviceKind.EXTRA, number)

    def _number(self, path: str) -> DeviceNumber | None:
        try:
            number = self._system.device(path)
        except OSError as error:
            fact = classify_error(path, error)
            if isinstance(fact, Unseen):
                raise
            if isinstance(fact, Broken):
                self.problems[path] = fact.why
            return None
        if number is None:
            self.problems[path] = f"{path}: not a character device"
        return number

    def _fits(self, path: str, number: DeviceNumber, rule: Rule) -> bool:
        problem = f"{path}: is {number.major}:{number.minor}"
        if rule.registered:
            if rule.registered in self._registered.get(number.major, ()):
                return True
            self.problems[path] = f"{problem}, but {PROC_DEVICES} has no {rule.registered} with that major"
            return False
        minor = self._misc.get(rule.misc) if rule.misc else rule.minor
        if minor is None:
            self.problems[path] = f"{path}: its driver is not loaded ({rule.misc} is not in {PROC_MISC})"
        elif (number.major, number.minor) != (MISC_MAJOR, minor):
            self.problems[path] = f"{problem}, not {MISC_MAJOR}:{minor}"
        else:
            return True
        return False


def observe_others(sources: Sources) -> VendorFacts:
    """Return the facts about the devices that machines request. If no machine requests any, nothing is read."""
    classes = sorted({name for each in sources.machines.values() for name in each.devices})
    paths = sorted({device.path for each in sources.machines.values() for device in each.extra_devices})
    if not classes and not paths:
        return VendorFacts(OTHER_DEVICES)
    try:
        checker = NodeChecker(sources.system)
        nodes = {node.path: node for name in classes for node in checker.class_nodes(device_class(name))}
        named = [node for path in paths if path not in nodes and (node := checker.named_node(path))]
    except OSError as error:
        return VendorFacts(OTHER_DEVICES, devices=Unseen(classify_error(error.filename or PROC_DEVICES, error).why))
    return VendorFacts(OTHER_DEVICES, devices=tuple(sorted((*nodes.values(), *named))), node_problems=checker.problems)


def grant_others(facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]) -> Grant:
    """Grant the nodes that this machine's settings request, and list the missing ones."""
    paths = tuple(each.path for each in settings.extra_devices)
    found = facts.devices if isinstance(facts.devices, tuple) else ()
    nodes = {node.path: node for node in found if node.kind in settings.devices or node.path in paths}
    kinds = {node.kind for node in nodes.values()}
    classes = [each for name in settings.devices if (each := device_class(name)).kind not in kinds]
    return Grant(
        vendor=facts.vendor,
        nodes=tuple(sorted(nodes.values())),
        driver_files=False,
        missing=(
            *(f'devices "{each.kind}" ({each.advice})' for each in classes),
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
