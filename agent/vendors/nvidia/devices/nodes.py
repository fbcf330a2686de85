"""Observes NVIDIA's device nodes. sysfs has no devices for them, so nodes in /dev are checked against procfs.

Nodes stay when the driver is unloaded, so a node is used only if its major is registered now.
"""

import errno
import re
from collections.abc import Iterator

from msgspec import Struct

from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import DeviceNode, DrmDevice, Gpu, IncompletePartition, Seen, Unseen
from agent.system.files import System
from agent.system.seen import classify_error, entries_if_present
from agent.system.sysfs import DRI
from agent.vendors.host_vendor import Sources
from agent.vendors.nvidia.devices.capabilities import CAPABILITIES, observe_capabilities
from agent.vendors.nvidia.devices.gpus import GPUS, KERNEL_DRIVER, GpuList
from agent.vendors.nvidia.mig import Instance, complete, incomplete_instances, parse_instance
from agent.vendors.nvidia.sockets import DIRECTORIES
from agent.vendors.proc_devices import PROC_DEVICES, parse_majors


class Rule(Struct, frozen=True):
    """Describes nodes of one kind. Their numbers are from nv-chardev-numbers.h (kernel-open) and nvidia-modprobe."""

    kind: DeviceKind
    pattern: re.Pattern[str]
    """Matches the node's name, without the directory. The group, if there is one, is the minor number."""
    registered: tuple[str, ...]
    """Names in /proc/devices. The first one that is registered is used."""
    minor: int | None = None
    """The minor number; None if the node's name contains the minor number."""


FRONTEND = ("nvidia", "nvidia-frontend")
"""Names in /proc/devices of the driver's main major number: `nvidia-frontend` up to driver 535, later `nvidia`. Since
545, nvidiactl and nvidia-modeset also have lines of their own."""
RULES = {
    "/dev": (
        Rule(DeviceKind.GPU, re.compile(r"nvidia([0-9]{1,9})"), FRONTEND),
        Rule(DeviceKind.CONTROL, re.compile(r"nvidiactl"), ("nvidiactl", *FRONTEND), 255),
        Rule(DeviceKind.MODESET, re.compile(r"nvidia-modeset"), ("nvidia-modeset", *FRONTEND), 254),
        Rule(DeviceKind.UVM, re.compile(r"nvidia-uvm"), ("nvidia-uvm",), 0),
        Rule(DeviceKind.UVM_TOOLS, re.compile(r"nvidia-uvm-tools"), ("nvidia-uvm",), 1),
        Rule(DeviceKind.NVSWITCH, re.compile(r"nvidia-nvswitchctl"), ("nvidia-nvswitch",), 255),
        Rule(DeviceKind.NVSWITCH, re.compile(r"nvidia-nvswitch([0-9]{1,9})"), ("nvidia-nvswitch",)),
        Rule(DeviceKind.NVLINK, re.compile(r"nvidia-nvlink"), ("nvidia-nvlink",), 0),
    ),
    "/dev/nvidia-caps": (Rule(DeviceKind.CAPABILITY, re.compile(r"nvidia-cap([0-9]{1,9})"), ("nvidia-caps",)),),
    "/dev/nvidia-caps-imex-channels": (
        Rule(DeviceKind.IMEX_CHANNEL, re.compile(r"channel([0-9]{1,9})"), ("nvidia-caps-imex-channels",)),
    ),
}
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


class Observed(Struct, frozen=True):
    """The result of observe_devices."""

    nodes: Seen[tuple[DeviceNode, ...]]
    """The usable nodes; Unseen if any node could not be observed."""
    problems: tuple[str, ...] = ()
    """A sentence for each node that must not be granted, except nodes of incomplete or destroyed MIG instances."""
    incomplete: tuple[IncompletePartition, ...] = ()
    """Incomplete MIG instances. None of their nodes is in `nodes`."""


def observe_devices(sources: Sources, listed: GpuList) -> Observed:
    """Return all usable nodes, and what is wrong with the other nodes."""
    drm = sources.drm
    if listed.unseen:
        return Observed(Unseen(listed.unseen))
    if not isinstance(drm, tuple):
        return Observed(Unseen(drm.why))
    try:
        text = sources.system.read_text(PROC_DEVICES)
        checker = _NodeChecker(sources.system, parse_majors(text), listed.gpus, observe_capabilities(sources.system))
        nodes = [node for directory in RULES for node in checker.directory(directory)]
        nodes += [node for device in drm if (node := checker.drm(device))]
    except OSError as error:
        return Observed(Unseen(classify_error(error.filename or PROC_DEVICES, error).why))
    whole = complete(instance for node in nodes if (instance := parse_instance(node.capability)))
    nodes = [node for node in nodes if not (instance := parse_instance(node.capability)) or instance in whole]
    kinds = list(DeviceKind)
    ordered = sorted(nodes, key=lambda node: (kinds.index(node.kind), node.number.minor, node.path))
    return Observed(tuple(ordered), tuple(checker.problems), tuple(checker.incomplete()))


class _NodeChecker:
    """Checks nodes one by one and collects problems. Raises OSError if a node cannot be observed."""

    def __init__(
        self, system: System, majors: dict[str, int], gpus: tuple[Gpu, ...], capabilities: dict[int, str]
    ) -> None:
        self.problems: list[str] = []
        self._system = system
        self._majors = majors
        self._capabilities = capabilities
        self._by_minor = {each.minor: each for each in gpus if each.minor is not None}
        self._by_address = {each.pci_address: each for each in gpus if each.driver == KERNEL_DRIVER}
        self._with_node: set[str] = set()
        """Capabilities that have a node."""

    def directory(self, directory: str) -> list[DeviceNode]:
        """Return the usable nodes in one directory, which may be missing."""
        found = []
        # Other names are skipped first, because a host has hundreds of other nodes.
        for name in (each for each in entries_if_present(self._system, directory) if each.startswith(PREFIXES)):
            if not name.isprintable():
                self.problems.append(f"{directory}/: unexpected characters in the device name {name!a}")
                continue
            for rule in RULES[directory]:
                match = rule.pattern.fullmatch(name)
                node = self._node(f"{directory}/{name}", rule, match) if match else None
                if node:
                    found.append(node)
        return found

    def drm(self, device: DrmDevice) -> DeviceNode | None:
        """Return the node of a DRM device.

        Return None if the device's GPU does not use NVIDIA's driver, or if the node is missing or must not be used.
        """
        gpu = self._by_address.get(device.pci_address)
        if gpu is None:
            return None
        kind = DeviceKind.DRI_RENDER if "/renderD" in device.path else DeviceKind.DRI_CARD
        number = self._number(device.path, ("drm",))
        return DeviceNode(device.path, kind, number, gpu.pci_address) if number else None

    def _node(self, path: str, rule: Rule, match: re.Match[str]) -> DeviceNode | None:
        wanted = int(match[1]) if rule.minor is None else rule.minor
        number = self._number(path, rule.registered, wanted)
        if number is None:
            return None
        if rule.kind is DeviceKind.CAPABILITY:
            return self._capability(path, number)
        if rule.kind is not DeviceKind.GPU:
            return DeviceNode(path, rule.kind, number)
        gpu = self._by_minor.get(wanted)
        if gpu is None and self._by_address and not self._by_minor:
            # sysfs shows a GPU that is bound to the driver, but the driver's list is empty. The cause is not a GPU that
            # is just being unbound: sysfs would show that first. So the list is wrong, or not complete yet.
            raise OSError(errno.EAGAIN, f"lists no GPU, but the driver is bound to {', '.join(self._by_address)}", GPUS)
        if gpu is None:
            self.problems.append(f"{path}: the driver has no GPU with minor {wanted}; ignoring the leftover node")
            return None
        return DeviceNode(path, rule.kind, number, gpu.pci_address)

    def _capability(self, path: str, number: DeviceNumber) -> DeviceNode | None:
        name = self._capabilities.get(number.minor)
        if not name:
            # The MIG instance was destroyed. Its node stays, but is harmless: it no longer gives access to anything.
            return None
        self._with_node.add(name)
        instance = parse_instance(name)
        if not instance:
            return DeviceNode(path, DeviceKind.CAPABILITY, number, capability=name)
        # The capability's name contains the GPU's current minor, even if the GPU came back with another minor.
        gpu = self._by_minor.get(instance.gpu)
        return DeviceNode(path, DeviceKind.CAPABILITY, number, gpu.pci_address, name) if gpu else None

    def incomplete(self) -> Iterator[IncompletePartition]:
        """Yield MIG instances that exist but are not complete."""
        node_minors = {
            instance: minor for minor, name in self._capabilities.items() if (instance := parse_instance(name))
        }
        usable = {instance for name in self._with_node if (instance := parse_instance(name))}
        for instance, missing in incomplete_instances(node_minors.keys(), usable):
            gpu = self._by_minor.get(instance.gpu)
            if gpu is None:
                # The GPU has left the driver's list, so its instances are gone too.
                continue
            why = "has no compute instance yet (`nvidia-smi mig -cci` makes one)"
            if missing:
                why = f"is missing {', '.join(_missing_part(each, node_minors.get(each)) for each in missing)}"
            yield IncompletePartition(gpu.pci_address, f"MIG instance {instance} of {gpu.pci_address} {why}")

    def _number(self, path: str, registered: tuple[str, ...], minor: int | None = None) -> DeviceNumber | None:
        """Return the node's number; None if the node was removed or must not be used.

        If the node must not be used, the reason is added to `problems`.
        """
        try:
            number = self._system.device(path)
        except FileNotFoundError:
            return None
        major = next((self._majors[name] for name in registered if name in self._majors), None)
        if number is None:
            self.problems.append(f"{path}: not a character device")
        elif major is None:
            self.problems.append(f"{path}: its driver is not loaded ({registered[0]} is not in {PROC_DEVICES})")
        elif number.major != major or (minor is not None and number.minor != minor):
            wanted = f"{major}:{minor}" if minor is not None else f"major {major}"
            self.problems.append(
                f"{path}: is {number.major}:{number.minor}, but the driver uses {wanted}; "
                "remove the node and create it again"
            )
        else:
            return number
        return None


def _missing_part(instance: Instance, minor: int | None) -> str:
    """Return what is missing: the node, or, while the instance is being made or destroyed, its entry in procfs."""
    path = f"{CAPABILITIES}/gpu{instance.gpu}/mig/{instance}/access"
    return path if minor is None else f"/dev/nvidia-caps/nvidia-cap{minor} (`nvidia-modprobe -f {path}` makes it)"
