"""The nodes of non-GPU devices, each checked against its driver's present number.

Fixed numbers are from include/linux/miscdevice.h; the others from /proc/misc or /proc/devices (proc(5)).
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import Broken, DeviceNode, Unseen
from agent.system.files import System
from agent.system.seen import why_not
from agent.vendors.proc_devices import PROC_DEVICES, names_by_major, parse_misc

PROC_MISC = "/proc/misc"
MISC_MAJOR = 10
"""Major of the kernel's miscellaneous devices (include/uapi/linux/major.h)."""
GPU_DRIVERS = ("nvidia*", "drm", "kfd")
"""Patterns of the drivers of GPUs' nodes in /proc/devices. Such nodes are granted only with their GPU."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Nodes of one directory."""

    pattern: re.Pattern[str]
    """Pattern of the name in the directory."""
    minor: int | None = None
    """For a miscellaneous device with a fixed number: its node may exist before its module, and loads that."""
    misc: str = ""
    """For one without: its name in /proc/misc."""
    registered: str = ""
    """For any other device: its driver's name in /proc/devices."""
    directory: str = "/dev"


@dataclass(frozen=True, slots=True)
class Switch:
    """The meaning of one name in the setting `devices`."""

    kind: DeviceKind
    rules: tuple[Rule, ...]
    advice: str
    """How to get the nodes."""


SWITCHES = (
    Switch(DeviceKind.KVM, (Rule(re.compile("kvm"), 232),), "load the module kvm_intel or kvm_amd"),
    Switch(DeviceKind.TUN, (Rule(re.compile("tun"), 200, directory="/dev/net"),), "load the module tun"),
    Switch(
        DeviceKind.VHOST,
        (Rule(re.compile("vhost-net"), 238), Rule(re.compile("vhost-vsock"), 241)),
        "load the modules vhost_net and vhost_vsock",
    ),
    Switch(
        DeviceKind.INFINIBAND,
        (
            Rule(re.compile("uverbs[0-9]+"), registered="infiniband_verbs", directory="/dev/infiniband"),
            Rule(re.compile("rdma_cm"), misc="rdma_cm", directory="/dev/infiniband"),
        ),
        "load the modules ib_uverbs and rdma_ucm and that of the adapter",
    ),
    Switch(
        DeviceKind.GDRCOPY,
        (Rule(re.compile("gdrdrv"), registered="gdrdrv"),),
        "load the module gdrdrv and make its node, as GDRCopy's package does",
    ),
    Switch(
        DeviceKind.NVIDIA_FS,
        (Rule(re.compile("nvidia-fs[0-9]+"), registered="nvidia-fs"),),
        "load the module nvidia_fs",
    ),
    Switch(
        DeviceKind.ACCEL,
        (Rule(re.compile("accel[0-9]+"), registered="accel", directory="/dev/accel"),),
        "load the accelerator's module, such as intel_vpu or amdxdna",
    ),
)
NODE_NAMES: tuple[str, ...] = (
    "kvm", "net", "vhost-net", "vhost-vsock", "infiniband", "gdrdrv", "nvidia-fs*", "accel",
)  # fmt: skip
"""Names in /dev of all nodes of SWITCHES and of their directories."""
NODE_DIRECTORIES: tuple[str, ...] = ("/dev/net", "/dev/infiniband", "/dev/accel")


def switch(name: str) -> Switch:
    """Return a switch. Raises KeyError for an unknown name."""
    return {str(each.kind): each for each in SWITCHES}[name]


class Looker:
    """Checks nodes one by one and collects problems; raises OSError for anything but a missing node."""

    def __init__(self, system: System) -> None:
        self.problems: list[str] = []
        self._system = system
        self._registered = names_by_major(system.read_text(PROC_DEVICES))
        self._misc = parse_misc(system.read_text(PROC_MISC)) if system.exists(PROC_MISC) else {}

    def of_switch(self, wanted: Switch) -> Iterator[DeviceNode]:
        """Yield a switch's usable nodes; some may be missing."""
        for rule in wanted.rules:
            for name in self._entries(rule.directory):
                if not rule.pattern.fullmatch(name):
                    continue
                number = self._number(f"{rule.directory}/{name}")
                if number and self._fits(f"{rule.directory}/{name}", number, rule):
                    yield DeviceNode(f"{rule.directory}/{name}", wanted.kind, number)

    def named(self, path: str) -> DeviceNode | None:
        """Return a node that settings name; None for a GPU's node, whatever its path."""
        number = self._number(path)
        if number is None:
            return None
        names = self._registered.get(number.major, frozenset())
        if name := _first(names, GPU_DRIVERS):
            self.problems.append(f"{path}: is of driver {name}, whose devices are given by `gpus` and `devices` alone")
            return None
        return DeviceNode(path, DeviceKind.EXTRA, number)

    def _entries(self, directory: str) -> tuple[str, ...]:
        try:
            return self._system.entries(directory)
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def _number(self, path: str) -> DeviceNumber | None:
        try:
            number = self._system.device(path)
        except OSError as error:
            found = why_not(path, error)
            if isinstance(found, Unseen):
                raise
            if isinstance(found, Broken):
                self.problems.append(found.why)
            return None
        if number is None:
            self.problems.append(f"{path}: not a character device")
        return number

    def _fits(self, path: str, number: DeviceNumber, rule: Rule) -> bool:
        found = f"{path}: is {number.major}:{number.minor}"
        if rule.registered:
            if rule.registered in self._registered.get(number.major, ()):
                return True
            self.problems.append(f"{found}, and {PROC_DEVICES} has no {rule.registered} with that major")
            return False
        minor = self._misc.get(rule.misc) if rule.misc else rule.minor
        if minor is None:
            self.problems.append(f"{path}: its driver is not loaded ({rule.misc} is not in {PROC_MISC})")
        elif (number.major, number.minor) != (MISC_MAJOR, minor):
            self.problems.append(f"{found}, not {MISC_MAJOR}:{minor}")
        else:
            return True
        return False


def _first(names: Collection[str], patterns: Iterable[str]) -> str:
    return next((name for name in sorted(names) for pattern in patterns if fnmatchcase(name, pattern)), "")


def lacking(
    wanted: Iterable[str], paths: Iterable[str], nodes: Mapping[str, DeviceKind], problems: Iterable[str]
) -> tuple[str, ...]:
    """Return a sentence for each requested switch or path that is not in `nodes` (kinds by path). Pure."""
    said = []
    for name in wanted:
        found = switch(name)
        if found.kind not in nodes.values():
            said.append(f'devices "{name}" ({found.advice})')
    for path in paths:
        if path not in nodes:
            said.append(next((problem for problem in problems if problem.startswith(f"{path}: ")), path))
    return tuple(said)
