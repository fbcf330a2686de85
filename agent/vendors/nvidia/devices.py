"""Observes GPUs. The PCI bus shows which GPUs exist; /proc/driver/nvidia/gpus has what the driver knows."""

import contextlib
import errno
import functools
import pkgutil
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Set
from types import MappingProxyType

from msgspec import Struct

from agent.model.device import PCI_ADDRESS, DeviceKind, DeviceNumber
from agent.model.facts import (
    Absent,
    Broken,
    DeviceNode,
    DrmDevice,
    Gpu,
    IncompletePartition,
    PciDevice,
    Seen,
    Unseen,
    Verdict,
)
from agent.model.text import whole_number
from agent.system.deadlines import read_device_text, read_device_texts
from agent.system.devices import DRI
from agent.system.files import System
from agent.system.trust import classify_error, entries_if_present, read_seen
from agent.vendors.host_vendor import PROC_DEVICES, GpuError, KernelLine, Sources, parse_majors, usable_number
from agent.vendors.nvidia.contract import DIRECTORIES, Instance, parse_instance

VENDOR_ID = 0x10DE
DISPLAY_CLASSES = frozenset({0x0300, 0x0302})
"""PCI classes of VGA controllers and 3D controllers, without the lowest byte, the programming interface."""
KERNEL_DRIVER = "nvidia"
"""The driver's name on the PCI bus. The name is the same on Debian, which renames only the module's file."""

MODEL_LIMIT = 200
"""Characters of the longest model name that messages show. No real name is half as long."""

PCI_DRIVERS = "/sys/bus/pci/drivers"
COMPANIONS = {"nova_core": ("nova_drm",)}
"""Modules that belong to another one, even if they do not show as its users."""

EXCLUDED = ("GPU Excluded", "Blacklisted")
"""The key that says whether the driver lets nobody open a GPU. Older drivers, such as 418, have the second name."""

GPUS = "/proc/driver/nvidia/gpus"


class Information(Struct, frozen=True):
    """The content of one GPU's `information` file (nv-procfs.c)."""

    model: str = ""
    uuid: str = ""
    minor: int | None = None
    excluded: bool = False


def parse_information(text: str) -> Information:
    """Parse an `information` file: lines of `Key: value`. Until the GPU is initialised, the UUID is `GPU-????...`."""
    fields = (line.partition(":") for line in text.splitlines())
    values = {key.strip(): value.strip() for key, _, value in fields}
    uuid, minor, model = (values.get(key, "") for key in ("GPU UUID", "Device Minor", "Model"))
    return Information(
        model=model if model.isprintable() and len(model) <= MODEL_LIMIT else "",
        uuid=uuid if re.fullmatch(r"GPU-[0-9a-f-]{36}", uuid) else "",
        minor=int(minor) if re.fullmatch(r"[0-9]{1,4}", minor) else None,
        excluded=any(values.get(name) == "Yes" for name in EXCLUDED),
    )


class GpuList(Struct, frozen=True):
    """NVIDIA's GPUs on a host, with any driver or none."""

    gpus: tuple[Gpu, ...]
    unseen: str = ""
    """Why the list may be incomplete; empty if it is complete. While it may be incomplete, nothing may be withdrawn."""
    problems: tuple[str, ...] = ()


def observe_gpus(
    system: System,
    pci: Seen[tuple[PciDevice, ...]],
    lost: Mapping[str, str] = MappingProxyType({}),
    why_unbound: Callable[[PciDevice], str] = lambda device: "",
    detached: Set[str] = frozenset(),
) -> GpuList:
    """Return the GPUs on the PCI bus; if the bus could not be listed, the GPUs that the driver lists.

    `why_unbound` is as in Sources.
    """
    known: dict[str, Information] = {}
    names = read_seen(system.entries, GPUS)
    unseen = [names.why] if isinstance(names, Broken | Unseen) else []
    listed = names if isinstance(names, tuple) else ()
    problems = [f"{GPUS}: {name!a} is not a PCI address" for name in listed if not PCI_ADDRESS.fullmatch(name)]
    addresses = [name for name in listed if PCI_ADDRESS.fullmatch(name)]
    paths = [f"{GPUS}/{address}/information" for address in addresses]
    for address, path, text in zip(addresses, paths, read_device_texts(system, paths), strict=True):
        found = classify_error(path, text) if isinstance(text, OSError) else text
        if isinstance(found, str):
            known[address] = parse_information(found)
        elif not isinstance(found, Absent):
            unseen.append(found.why)
    if isinstance(pci, tuple):
        of_vendor = (each for each in pci if each.vendor_id == VENDOR_ID)
        devices = {each.address: each for each in of_vendor if each.class_id >> 8 in DISPLAY_CLASSES}
        if known and not devices:
            # A GPU leaves the driver's list before it leaves the bus, so one of the two lists is wrong.
            unseen.append(f"the PCI bus lists no GPU of this vendor, but the driver lists {', '.join(known)}")
    else:
        devices = {each: PciDevice(each, VENDOR_ID, 0, KERNEL_DRIVER) for each in known}
        unseen.append(pci.why)
    gpus = []
    for address, device in sorted(devices.items()):
        each = known.get(address, Information())
        modules = None if device.driver in ("", KERNEL_DRIVER) else _modules(system, device.driver)
        why_lost, is_detached = lost.get(address, ""), address in detached
        states = (why_lost, is_detached, each.excluded, device.override, device.virtual, device.integrated, modules)
        gpus.append(
            Gpu(address, "nvidia", device.driver, each.model, each.uuid, each.minor, *states, why_unbound(device))
        )
    excluded = sorted(address for address, each in known.items() if each.excluded)
    problems += [f"GPU {address} is excluded by a parameter of the kernel module nvidia" for address in excluded]
    return GpuList(tuple(gpus), "; ".join(unseen), tuple(problems))


def _modules(system: System, driver: str) -> tuple[str, ...] | None:
    """Return Gpu.modules of a driver on the PCI bus. The names may differ: the driver NovaCore is in nova_core."""
    place = f"{PCI_DRIVERS}/{driver}"
    try:
        target = system.read_link(f"{place}/module")
        if target is None:
            return () if system.is_directory(place) else None
        module = posixpath.basename(target)
        # modprobe loads a blacklisted module after all if a module that is not blacklisted needs it.
        holders = entries_if_present(system, f"/sys/module/{module}/holders")
    except OSError:
        return None
    return (module, *dict.fromkeys((*COMPANIONS.get(module, ()), *holders)))


STAND_INS = ("pci-stub", "pciback")
"""Drivers that reserve a device for a virtual machine: the first for KVM, the second for Xen. VFIO's drivers reserve
devices too. They are not listed here, because `misbound_gpus` recognises them by `vfio` in their names."""


def misbound_gpus(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return the GPUs with a wrong driver, such as nouveau. A driver that reserves a GPU for a VM is not wrong."""
    right = ("", KERNEL_DRIVER, *STAND_INS)
    return tuple(sorted(gpu for gpu in gpus if gpu.driver not in right and "vfio" not in gpu.driver))


def modules_to_blacklist(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Return the kernel modules of wrong drivers. If a module's name is unknown, it is taken to be the driver's."""
    wrong = misbound_gpus(gpus)
    modules = ((gpu.driver.replace("-", "_"),) if gpu.modules is None else gpu.modules for gpu in wrong)
    return tuple(dict.fromkeys(sorted(name for names in modules for name in names)))


def built_in(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Return the PCI addresses of GPUs with a wrong driver that is built into the kernel."""
    return tuple(gpu.pci_address for gpu in misbound_gpus(gpus) if gpu.modules == ())


# Observes NVIDIA's capabilities (kernel-open/nvidia/nv-caps.c).
#
# Whoever can open a capability's node has the capability. Nodes of destroyed MIG instances stay in /dev/nvidia-caps.
# Only the entries in procfs show which capabilities exist.

CAPABILITIES = "/proc/driver/nvidia/capabilities"
MINOR_TABLES = ("/proc/driver/nvidia-caps/mig-minors", "/proc/driver/nvidia-caps/sys-minors")
"""Tables of the minors of all possible capabilities, with lines `name minor`. Every user may read them."""
MINOR = re.compile(r"^DeviceFileMinor:\s*([0-9]{1,9})\s*$", re.MULTILINE)
DEPTH = 6
"""How many levels of directories below CAPABILITIES are searched. Fewer would be enough: the path of the deepest entry,
gpu0/mig/gi1/ci0/access, has 5 parts."""


def observe_capabilities(system: System) -> dict[int, str]:
    """Return the existing capabilities by minor, as paths relative to CAPABILITIES. Raises OSError."""
    by_minor: dict[int, str] = {}
    table: dict[str, int] = {}
    names = list(_walk(system, "", DEPTH))
    texts = read_device_texts(system, [f"{CAPABILITIES}/{name}" for name in names])
    for name, text in zip(names, texts, strict=True):
        if isinstance(text, FileNotFoundError | NotADirectoryError):
            continue
        if isinstance(text, PermissionError):
            # Only root may read mig/config and fabric-imex-mgmt, but the tables have their minors.
            table = table or _tables(system)
            minor = table.get(name.replace("mig/", "", 1))
        elif isinstance(text, OSError):
            raise text
        else:
            minor = int(found[1]) if (found := MINOR.search(text)) else None
        if minor is not None:
            by_minor[minor] = name
    return by_minor


def _walk(system: System, below: str, depth: int) -> Iterator[str]:
    """Yield the relative paths of all files. A file that is removed during the walk may be missing."""
    for name in entries_if_present(system, f"{CAPABILITIES}/{below}".rstrip("/")):
        path = f"{below}/{name}".lstrip("/")
        if not system.is_directory(f"{CAPABILITIES}/{path}"):
            yield path
        elif depth:
            yield from _walk(system, path, depth - 1)


def _tables(system: System) -> dict[str, int]:
    lines: list[str] = []
    for table in MINOR_TABLES:
        with contextlib.suppress(FileNotFoundError):
            lines += read_device_text(system, table).splitlines()
    fields = (line.rpartition(" ") for line in lines)
    return {name: minor for name, _, digits in fields if (minor := whole_number(digits)) is not None}


# Observes NVIDIA's device nodes. sysfs has no devices for them, so nodes in /dev are checked against procfs.
#
# Nodes stay when the driver is unloaded, so a node is used only if its major is registered now.


class Rule(Struct, frozen=True):
    """Describes nodes of one kind. Their numbers are from nv-chardev-numbers.h (kernel-open) and nvidia-modprobe."""

    kind: DeviceKind
    name: str
    """The node's name without the directory and, if `minor` is None, without the minor number at its end."""
    registered: tuple[str, ...]
    """Names in /proc/devices. The first one that is registered is used."""
    minor: int | None = None
    option: tuple[str, ...] = ()
    """The option with which nvidia-modprobe makes the node; empty if neither it nor the agent does."""

    def major(self, majors: Mapping[str, int]) -> int | None:
        return next((majors[name] for name in self.registered if name in majors), None)


FRONTEND = ("nvidia", "nvidia-frontend")
"""Names in /proc/devices of the driver's main major number: `nvidia-frontend` up to driver 535, later `nvidia`. Since
545, nvidiactl and nvidia-modeset also have lines of their own."""
RULES = {
    "/dev": (
        Rule(DeviceKind.CONTROL, "nvidiactl", ("nvidiactl", *FRONTEND), 255, ("-c", "255")),
        # The minor of the GPU follows.
        Rule(DeviceKind.GPU, "nvidia", FRONTEND, option=("-c",)),
        Rule(DeviceKind.MODESET, "nvidia-modeset", ("nvidia-modeset", *FRONTEND), 254, ("-m",)),
        # With -u, the number after -c is the minor of /dev/nvidia-uvm. The same run also makes /dev/nvidia-uvm-tools.
        Rule(DeviceKind.UVM, "nvidia-uvm", ("nvidia-uvm",), 0, ("-u", "-c", "0")),
        Rule(DeviceKind.UVM_TOOLS, "nvidia-uvm-tools", ("nvidia-uvm",), 1, ("-u", "-c", "0")),
        Rule(DeviceKind.NVSWITCH, "nvidia-nvswitchctl", ("nvidia-nvswitch",), 255),
        Rule(DeviceKind.NVSWITCH, "nvidia-nvswitch", ("nvidia-nvswitch",)),
        Rule(DeviceKind.NVLINK, "nvidia-nvlink", ("nvidia-nvlink",), 0),
    ),
    "/dev/nvidia-caps": (Rule(DeviceKind.CAPABILITY, "nvidia-cap", ("nvidia-caps",)),),
    "/dev/nvidia-caps-imex-channels": (Rule(DeviceKind.IMEX_CHANNEL, "channel", ("nvidia-caps-imex-channels",)),),
}
DRM = Rule(DeviceKind.DRI_CARD, "", ("drm",))
PREFIXES = ("nvidia", "channel")
"""Every name that a rule matches begins with one of these."""
SWITCH_CONTROL = "/dev/nvidia-nvswitchctl"
NODE_NAMES: tuple[str, ...] = ("nvidia*", "dri")
"""Patterns (fnmatch) of names in /dev: nodes in RULES, their directories, and DRI."""
NODE_DIRECTORIES: tuple[str, ...] = (
    *(directory for directory in RULES if directory != "/dev"),
    DRI,
    # Daemons that restart may make new directories.
    *DIRECTORIES.values(),
)


def observe_devices(
    sources: Sources, listed: GpuList
) -> tuple[Seen[tuple[DeviceNode, ...]], Mapping[str, str], tuple[IncompletePartition, ...]]:
    """Return all usable nodes, Unseen if any node could not be observed; and what is wrong with the others.

    The second value is why nodes must not be granted, by path, except nodes of incomplete or destroyed MIG instances;
    the third has the incomplete instances, none of whose nodes is among the usable ones.
    """
    if listed.unseen:
        return Unseen(listed.unseen), {}, ()
    if not isinstance(sources.drm, tuple):
        return Unseen(sources.drm.why), {}, ()
    try:
        checker = _NodeChecker(sources.system, listed.gpus)
        nodes = [*checker.nodes(sources.drm)]
    except OSError as error:
        return Unseen(classify_error(error.filename or PROC_DEVICES, error).why), {}, ()
    usable = {instance for node in nodes if (instance := parse_instance(node.capability))}
    compute = {each for each in usable if each.ci is not None and each.gpu_instance in usable}
    # A GPU instance is complete if one of its compute instances is.
    whole = {None, *compute, *(each.gpu_instance for each in compute)}
    nodes = [node for node in nodes if parse_instance(node.capability) in whole]
    kinds = list(DeviceKind)
    nodes.sort(key=lambda node: (kinds.index(node.kind), node.number.minor, node.path))
    return tuple(nodes), checker.problems, tuple(checker.incomplete(usable))


class _NodeChecker:
    """Checks nodes one by one and collects problems. Raises OSError if a node cannot be observed."""

    def __init__(self, system: System, gpus: tuple[Gpu, ...]) -> None:
        self.problems: dict[str, str] = {}
        self._system = system
        self._majors = parse_majors(system.read_text(PROC_DEVICES))
        self._capabilities = observe_capabilities(system)
        self._by_minor = {each.minor: each for each in gpus if each.minor is not None}
        self._by_address = {each.pci_address: each for each in gpus if each.driver == KERNEL_DRIVER}

    def nodes(self, drm: tuple[DrmDevice, ...]) -> Iterator[DeviceNode]:
        """Yield the nodes that have the right numbers."""
        for directory, rules in RULES.items():
            # Other names are skipped first, because a host has hundreds of other nodes.
            for name in (each for each in entries_if_present(self._system, directory) if each.startswith(PREFIXES)):
                path = f"{directory}/{name}"
                if not name.isprintable():
                    self.problems[path] = f"{directory}/: unexpected characters in the device name {name!a}"
                    continue
                for rule in rules:
                    match = re.fullmatch(rule.name + ("([0-9]{1,9})" if rule.minor is None else "()"), name)
                    if match and (node := self._node(path, rule, int(match[1] or rule.minor or 0))):
                        yield node
        for device in drm:
            kind = DeviceKind.DRI_RENDER if "/renderD" in device.path else DeviceKind.DRI_CARD
            if device.pci_address in self._by_address and (number := self._number(device.path, DRM)):
                yield DeviceNode(device.path, kind, number, device.pci_address)

    def _node(self, path: str, rule: Rule, wanted: int) -> DeviceNode | None:
        number = self._number(path, rule, wanted)
        if number is None:
            return None
        # Without a name, the MIG instance was destroyed. Its node stays, but gives no longer access to anything.
        name = self._capabilities.get(number.minor, "") if rule.kind is DeviceKind.CAPABILITY else ""
        instance = parse_instance(name)
        if rule.kind is not DeviceKind.GPU and not instance:
            known = name or rule.kind is not DeviceKind.CAPABILITY
            return DeviceNode(path, rule.kind, number, capability=name) if known else None
        # The capability's name contains the GPU's current minor, even if the GPU came back with another minor.
        gpu = self._by_minor.get(instance.gpu if instance else wanted)
        if gpu:
            return DeviceNode(path, rule.kind, number, gpu.pci_address, name)
        if not instance and self._by_address and not self._by_minor:
            # sysfs shows a GPU that is bound to the driver, but the driver's list is empty. The cause is not a GPU that
            # is just being unbound: sysfs would show that first. So the list is wrong, or not complete yet.
            raise OSError(errno.EAGAIN, f"lists no GPU, but the driver is bound to {', '.join(self._by_address)}", GPUS)
        if not instance:
            self.problems[path] = f"{path}: the driver has no GPU with minor {wanted}; ignoring the leftover node"
        return None

    def incomplete(self, usable: Set[Instance]) -> Iterator[IncompletePartition]:
        """Yield MIG instances that exist but are not complete. `usable` has those that have a node.

        A GPU instance without a compute instance is incomplete too. The instances of a GPU that has left the driver's
        list are gone too.
        """
        minors = {each: minor for minor, name in self._capabilities.items() if (each := parse_instance(name))}
        in_use = {each.gpu_instance for each in minors if each.ci is not None}
        for each in sorted(minors, key=lambda each: (each[:2], str(each))):
            gpu, why = self._by_minor.get(each.gpu), "has no compute instance yet (`nvidia-smi mig -cci` makes one)"
            missing = [part for part in (each.gpu_instance, each) if part not in usable] if each.ci is not None else []
            if missing:
                why = f"is missing {', '.join(_missing_part(part, minors.get(part)) for part in missing)}"
            if gpu and (missing or (each.ci is None and each not in in_use)):
                yield IncompletePartition(gpu.pci_address, f"MIG instance {each} of {gpu.pci_address} {why}")

    def _number(self, path: str, rule: Rule, minor: int | None = None) -> DeviceNumber | None:
        major = rule.major(self._majors)
        majors, where = () if major is None else (major,), f"{rule.registered[0]} is not in {PROC_DEVICES}"
        return usable_number(self._system, path, majors, minor, where, self.problems)


def _missing_part(instance: Instance, minor: int | None) -> str:
    """Return what is missing: the node, or, while the instance is being made or destroyed, its entry in procfs."""
    path = f"{CAPABILITIES}/gpu{instance.gpu}/mig/{instance}/access"
    return path if minor is None else f"/dev/nvidia-caps/nvidia-cap{minor} (`nvidia-modprobe -f {path}` makes it)"


# Parses what NVIDIA's drivers write of faults into the kernel log: Xid errors of GPUs, SXid errors of NVSwitches, and
# lines without a number. Each counts only at the start of a record: elsewhere, the same text could be part of a USB
# device's name, which anyone can choose. The formats are from open-gpu-kernel-modules 595.45.04. Pure, except that it
# reads the catalogue.

ADDRESS = r"(?P<address>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])"
XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<address>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]{0,80}\): "
    r"(?P<number>[0-9]{1,3})\b"
)
"""The message of nvErrorLog_va. Old drivers write no `PCI:`, and MIG adds ` GPU-I:NN` after the address."""
CATALOGUE = "xids.tsv"
OFF_THE_BUS = 79
RECOVERY_ACTION = 154
RECOVERY = re.compile(r", GPU recovery action changed from 0x[0-9a-f]+ \([^)]{0,80}\) to 0x(?P<action>[0-9a-f]{1,8})\b")
"""The rest of the message of Xid 154 (_gpuRefreshRecoveryActionInLock in gpu.c). Drivers write it since 565."""
NVLINK_FATAL = re.compile(r" Fatal +XC[0-9]+ i[0-9]+ Link -?[0-9]+ \((?:0x[0-9a-f]{8}[ )]){4,6}$")
"""The end of the message of an NVLink 5 error (Xid 144 to 150) that ended the link's traffic. Others have `Nonfatal`. A
program's name, which comes before, is too short to look the same."""

ADVICE = {
    "": (Verdict.HEALTHY, "NVIDIA names no action; if one is needed, the driver says so by Xid 154"),
    "IGNORE": (Verdict.HEALTHY, "nothing needs to be done"),
    "XID_154": (Verdict.HEALTHY, "`dmesg` has the driver's words"),
    "RESTART_APP": (Verdict.HEALTHY, "restart the application that had it"),
    # Of all these numbers, the catalogue says "unused" of all but 142.
    "CONTACT_SUPPORT": (Verdict.DEGRADED, "if it comes again, ask NVIDIA's support"),
    "UPDATE_SWFW": (Verdict.DEGRADED, "use drivers for host and virtual machine that fit each other"),
    "CHECK_UVM": (Verdict.DEGRADED, "see the errors next to it; without any, ask NVIDIA's support"),
    "RESET_GPU": (Verdict.NEEDS_RESET, "drain the node and reset the GPU"),
    "RESTART_VM": (Verdict.NEEDS_REBOOT, "drain the node and reboot the host"),
    "RESTART_BM": (
        Verdict.NEEDS_REBOOT,
        "drain the node and reboot the host; if this recurs, check power and seating",
    ),
    "CHECK_MECHANICALS": (Verdict.BROKEN, "connect its power cables"),
    # What follows is not NVIDIA's, but from OWN_ACTIONS.
    "SOON": (Verdict.DEGRADED, "the GPU goes on working; reset it when its work is done"),
    "WATCH": (Verdict.DEGRADED, "the GPU goes on working; if this recurs, reset it; if that does not help, replace it"),
    "REPLACE": (Verdict.NEEDS_RESET, "drain the node and reset the GPU; if this recurs, replace it"),
    "NVLINK": (Verdict.HEALTHY, "the link goes on; if a reset is needed, the driver says so by Xid 154"),
}
"""What follows from each action in the catalogue for the GPU's health, and what to do."""
OWN_ACTIONS = {
    # NVIDIA's workflows begin with these actions.
    45: "RESTART_APP",
    48: "RESET_GPU",
    74: "RESET_GPU",
    # These too come from single applications: NVIDIA's device plugin ignores them, whatever the catalogue says.
    43: "RESTART_APP",
    109: "RESTART_APP",
    # The GPU goes on working, but has less memory in reserve.
    63: "SOON",
    94: "SOON",
    92: "WATCH",
    157: "WATCH",
    168: "WATCH",
    64: "REPLACE",
    140: "REPLACE",
    # Unless the message says Fatal. In the catalogue's own table of these errors, with 2 exceptions of 94, Fatal stands
    # for a reset, too.
    **dict.fromkeys(range(144, 151), "NVLINK"),
}
"""Actions that count instead of the catalogue's, by number."""
WORDS = {
    13: "an application's fault on the graphics engine",
    31: "an application's access to memory that it does not have",
    43: "a GPU that stopped processing for one application",
    45: "the end of an application whose channels were cleaned up",
    48: "a double-bit ECC error",
    54: "the board lacks auxiliary power",
    62: "a halt of the GPU's power management processor",
    63: "a memory row to be remapped, or a page to be retired",
    64: "a memory row that could not be remapped, or a page not retired",
    68: "a video processor error of one application",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected ECC errors",
    94: "a contained ECC error, which ended the application that had it",
    95: "an uncontained ECC error",
    109: "a context switch of one application that timed out",
    119: "the GPU's system processor (GSP) does not answer",
    120: "an error of the GPU's system processor (GSP)",
    136: "an NVLink link that could not be trained",
    140: "an ECC error that the driver could not contain",
    143: "the GPU could not be initialised",
    157: "a damaged part that could not be retired, because no spare is left",
    158: "the GPU does not answer",
    168: "less memory, because a protected part of it has errors",
}
"""What errors mean, where the catalogue's name does not say it."""
ACTIONS = {
    0: (Verdict.HEALTHY, "the driver needs no recovery of the GPU now"),
    1: (Verdict.NEEDS_RESET, "the driver needs a reset of the GPU; drain the node and reset the GPU"),
    2: (Verdict.NEEDS_REBOOT, "the driver needs a reboot; drain the node and reboot the host"),
    # The GPU and all it has to itself go on working, and the driver takes this back when such traffic has ended.
    3: (Verdict.DEGRADED, "the driver needs an end of peer-to-peer traffic; end the programs that use several GPUs"),
    # Programs go on, but the GPU's firmware recommends to give it no new ones (gpuIsDeviceMarkedForDrainAndReset).
    4: (Verdict.NEEDS_RESET, "the GPU should get no new work; drain the node and reset the GPU"),
    # Only memory that hosts share over NVLink cannot be allocated (fabricIsMemAllocDisabled).
    5: (Verdict.DEGRADED, "the driver needs a recovery of the IMEX domain; see nvidia-imex on its hosts"),
}
"""What each recovery action in the message of Xid 154 means, by NV2080_CTRL_GPU_RECOVERY_ACTION (ctrl2080gpu.h)."""
UNKNOWN_ACTION = Verdict.DEGRADED, "the driver needs a recovery of the GPU that this version does not know; see `dmesg`"


@functools.cache
def _catalogue() -> Mapping[int, tuple[str, str]]:
    """Return NVIDIA's name of each Xid, and its action in the catalogue, which may be empty."""
    text = (pkgutil.get_data("agent.vendors.nvidia", CATALOGUE) or b"").decode()
    rows = (line.split("\t") for line in text.splitlines() if not line.startswith("#"))
    return {int(number): (name, action) for number, name, action in rows}


def _parse_xid(text: str) -> GpuError | None:
    match = XID.match(text)
    if match is None:
        return None
    number, rest = int(match["number"]), text[match.end() :]
    recovery = RECOVERY.match(rest) if number == RECOVERY_ACTION else None
    name, action = _catalogue().get(number, ("", None))
    action = OWN_ACTIONS.get(number, action)
    if recovery:
        verdict, meaning = ACTIONS.get(int(recovery["action"], 16), UNKNOWN_ACTION)
    elif action is None:
        verdict, meaning = Verdict.HEALTHY, "it is not in the agent's copy of NVIDIA's Xid catalogue; see NVIDIA's"
    else:
        verdict, advice = ADVICE["RESET_GPU" if action == "NVLINK" and NVLINK_FATAL.search(rest) else action]
        meaning = f"{WORDS.get(number, name)}; {advice}"
    return GpuError(
        # The message omits the PCI function; a GPU is function 0.
        f"{match['address'].lower()}.0",
        f"Xid{number}",
        f"Xid {number}: {meaning}",
        verdict,
        number,
        from_application=action == "RESTART_APP",
        lost=number == OFF_THE_BUS,
        own_word=recovery is not None and verdict is Verdict.NEEDS_RESET,
        recovered=recovery is not None and int(recovery["action"], 16) == 0,
    )


_INSTALLED = (
    rf"NVRM: The NVIDIA v?GPU {ADDRESS} \(PCI ID: [0-9a-f]{{4}}:[0-9a-f]{{4}}\) "
    r"installed in this (?:vGPU host )?system "
)
_UNSUPPORTED = "this version of the driver does not support the GPU; install one that does"
LINES = (
    # Comes after Xid 79, or instead of it, and is the same error (osHandleGpuLost in osinit.c; nv-pci.c).
    KernelLine(
        rf"NVRM: GPU {ADDRESS}: GPU (?:has fallen off the bus|is lost)\b",
        f"Xid{OFF_THE_BUS}",
        Verdict.NEEDS_REBOOT,
        f"Xid {OFF_THE_BUS}: {WORDS[OFF_THE_BUS]}; {ADVICE['RESTART_BM'][1]}",
        lost=True,
    ),
    # The driver has the GPU, and tries again each time that somebody opens it (RmInitAdapter in osinit.c).
    KernelLine(
        rf"NVRM: GPU {ADDRESS}: RmInitAdapter failed!",
        "InitFailed",
        Verdict.NEEDS_RESET,
        "the driver could not initialise the GPU; drain the node and reset the GPU, or reboot the host",
        until_answer=True,
    ),
    # Only the proprietary modules write this, so no source has it; https://github.com/NVIDIA/open-gpu-kernel-modules
    # /issues does. A GPU that works only with another driver counts as broken: neither a reset nor a reboot helps.
    KernelLine(
        _INSTALLED + r"requires use of the NVIDIA open kernel modules",
        "NeedsOpenDriver",
        Verdict.BROKEN,
        "the GPU needs NVIDIA's open kernel modules; install them instead of the proprietary ones",
    ),
    # The following are from probes that fail (rm_is_supported_device in osapi.c, nv_pci_probe in nv-pci.c).
    KernelLine(
        _INSTALLED + r"has fallen off the bus",
        "FallenOffBus",
        Verdict.NEEDS_REBOOT,
        "the GPU did not answer the driver; power the host off and on; if this recurs, check power and seating",
        refused=True,
    ),
    KernelLine(
        _INSTALLED + r"is not supported by open nvidia\.ko",
        "NeedsProprietaryDriver",
        Verdict.BROKEN,
        "NVIDIA's open kernel modules do not support the GPU; install the proprietary ones",
        refused=True,
    ),
    KernelLine(
        _INSTALLED + r"is not supported by the .{0,40}\bdriver release",
        "UnsupportedGPU",
        Verdict.BROKEN,
        _UNSUPPORTED,
        refused=True,
    ),
    KernelLine(
        rf"NVRM: ignoring the legacy GPU {ADDRESS}",
        "UnsupportedGPU",
        Verdict.BROKEN,
        _UNSUPPORTED,
        refused=True,
    ),
    KernelLine(
        r"NVRM: This PCI I/O region assigned to your NVIDIA device is invalid: BAR[0-9] is [0-9]+M @ 0x[0-9a-f]+ "
        rf"\(PCI:{ADDRESS}\)",
        "InvalidRegion",
        Verdict.BROKEN,
        "the firmware gave the GPU no usable memory region; enable decoding above 4 GB in the BIOS, or update it",
        refused=True,
    ),
    # The kernel's own words, the second ones since Linux 6.9 (really_probe in drivers/base/dd.c). They follow those of
    # the driver, so they must not count as worse.
    KernelLine(
        rf"nvidia(?:: probe of)? {ADDRESS}(?:: probe with driver nvidia)? failed with error -",
        "ProbeFailed",
        Verdict.NEEDS_RESET,
        "the driver could not take the GPU; the lines before this one in `dmesg` say why",
        refused=True,
    ),
)
"""The lines without a number, with the group `address`. Of a record with several lines, each but the first lacks its
`NVRM: `. An error that is in several lines has its verdict from the worst. To add a line: a row, and an example in
tests/data/kernel_lines/nvidia.tsv."""

SXID = re.compile(
    rf"nvidia-nvswitch[0-9]+: SXid \(PCI:{ADDRESS}\): (?P<number>[0-9]{{5}}), "
    r"(?P<severity>Fatal|Non-fatal|Correctable), "
)
"""The message of NVSWITCH_PRINT_SXID (common_nvswitch.h), as the macros in intr_nvswitch.h and error_nvswitch.h use it.
The lines with an error's data, which follow, have another word there."""
FATAL_SXID = (
    "a fatal error of an NVSwitch; all GPUs that it connects may be affected; drain the node and reset all its GPUs "
    "together, or reboot the host; if this recurs, ask NVIDIA's support"
)
SXID_WORDS = "an error of an NVSwitch that did not end its work; nothing needs to be done"


def _parse_sxid(text: str) -> GpuError | None:
    match = SXID.match(text)
    if match is None:
        return None
    fatal = match["severity"] == "Fatal"
    verdict, meaning = (Verdict.NEEDS_RESET, FATAL_SXID) if fatal else (Verdict.HEALTHY, SXID_WORDS)
    number = int(match["number"])
    return GpuError(match["address"].lower(), f"SXid{number}", f"SXid {number}: {meaning}", verdict, vendor="nvidia")


def parse_kernel_message(text: str) -> GpuError | None:
    """Return the error that a record of the kernel log reports, of a GPU or an NVSwitch; None for any other record."""
    if error := _parse_xid(text) or _parse_sxid(text):
        return error
    # The kernel writes line breaks within a record like this.
    text = text.replace("\\x0aNVRM: ", " ")
    found = ((line, re.match(line.pattern, text)) for line in LINES)
    return next((line.error(match["address"].lower()) for line, match in found if match), None)
