"""The machine half of a vendor whose GPUs need only device nodes. The agent itself writes the CDI specification."""

import json
import posixpath
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Set
from typing import Any, NamedTuple

from agent.model.contract import AllocatableDevice
from agent.model.device import PCI_ADDRESS, DeviceKind, DeviceNumber, dri_link
from agent.model.errors import DocumentError
from agent.model.handoff import GrantedDevice, Request
from agent.system.files import System
from agent.vendors.cdi import devices as devices_of
from agent.vendors.cdi import lowest_version, object_of, objects, without_groups
from agent.vendors.machine_vendor import Generated, MachineVendor, Verdict

# The format is that of specs-go/config.go of the Container Device Interface. Three things are as in Intel's
# cdi-specs-generator (pkg/gpu/cdihelpers): which nodes a device has, its mounts, and the device name `cardN`. Two
# things are as in AMD's container toolkit (internal/cdi): the attributes of nodes, and the index as a device name. Each
# GPU is also a device named by the GPU's PCI address, because the other names may change at a reboot.


EVERY_GPU = "all"
FOR_ALL_USERS = 0o006
"""Permission bits of a node that every user may read and write."""


class MachineState(NamedTuple):
    """What a specification depends on in the machine."""

    live: Mapping[str, DeviceNumber]
    """Numbers, modes and owners of the granted nodes that exist in the machine, by path."""
    groups: Mapping[str, int]
    """The groups that nodes have in containers, by path, if they are others than in the machine."""
    links: Collection[str]
    """The existing links in /dev/dri/by-path that pods get."""


def render(kind: str, names: Mapping[str, str], request: Request, machine: MachineState) -> dict[str, Any]:
    """Return the specification for the GPUs whose render nodes exist.

    `names` has further names of GPUs, by PCI address. Each GPU is a device under its PCI address and, if it has a
    further name, also under that name. The device EVERY_GPU has the nodes of all these GPUs.
    """
    devices, every = [], []
    present = [each for each in request.devices if each.path in machine.live]
    served = {each.pci_address for each in present if each.kind == DeviceKind.DRI_RENDER}
    for gpu in (each for each in request.gpus if each in served):
        own = [each for each in present if each.pci_address in ("", gpu)]
        every += [each for each in own if each not in every]
        edits = _edits(own, machine)
        devices += [{"name": name, "containerEdits": edits} for name in (names.get(gpu), gpu) if name]
    if devices:
        devices.append({"name": EVERY_GPU, "containerEdits": _edits(every, machine)})
    spec = {"kind": kind, "devices": devices}
    return {"cdiVersion": lowest_version(spec), **spec}


def group_of(kind: str) -> str:
    """Return the name of the group that owns nodes of this kind: those of systemd's 50-udev-default.rules."""
    return "video" if kind == DeviceKind.DRI_CARD else "render"


def _edits(devices: list[GrantedDevice], machine: MachineState) -> dict[str, Any]:
    nodes, groups = [], set()
    for device in devices:
        number = machine.live[device.path]
        gid = machine.groups.get(device.path, number.gid)
        attributes = {"type": "c", "major": number.major, "minor": number.minor, "fileMode": number.mode}
        nodes.append({"path": device.path, **attributes, "permissions": "rw", "uid": number.uid, "gid": gid})
        # If a runtime may make device nodes, the nodes in the container have the group in the specification. If it may
        # not, it bind-mounts the machine's nodes, which have the host's group. A container's process gets both groups,
        # so it can open the node in either case, even if it is not root.
        if number.mode & FOR_ALL_USERS != FOR_ALL_USERS:
            groups |= {number.gid, gid}
    edits: dict[str, Any] = {"deviceNodes": nodes}
    links = [link for each in devices if (link := dri_link(each.kind, each.pci_address)) in machine.links]
    if links:
        options = {"type": "none", "options": ["bind", "rw"]}
        edits["mounts"] = [{"hostPath": link, "containerPath": link, **options} for link in links]
    if groups - {0}:
        edits["additionalGids"] = sorted(groups - {0})
    return edits


def verify(
    kind: str,
    names: Mapping[str, str],
    spec: object,
    request: Request,
    live: Mapping[str, DeviceNumber],
    present: Collection[str],
) -> Verdict:
    """Verify a specification against one request: it must be what `render` makes of those existing nodes that it has.

    The nodes' groups, which depend on the machine's file of groups, are taken from the specification itself too. It may
    lack granted nodes, such as those of a GPU that was added while no new one could be written. If it is malformed, the
    verdict has a single problem, which names the malformed part.
    """
    try:
        document = object_of(spec, "the specification")
        devices = devices_of(document)
        nodes = [node for _, edits in devices for node in objects(edits, "deviceNodes")]
    except DocumentError as error:
        return Verdict(problems=(error.message,))
    groups = {str(node.get("path")): gid for node in nodes if type(gid := node.get("gid")) is int}
    paths = {str(node.get("path")) for node in nodes}
    claimed = request._replace(devices=tuple(each for each in request.devices if each.path in paths))
    wanted: Any = render(kind, names, claimed, MachineState(live, groups, present))
    if document == without_groups(document):
        # This machine's containerd may be too old for groups.
        wanted = without_groups(wanted)
    # The text is compared, because 1, 1.0 and True are equal in Python.
    found, expected = (
        {(name, json.dumps(edits, sort_keys=True)) for name, edits in each} for each in (devices, devices_of(wanted))
    )
    problems = [
        f"device node {each.path} is {live[each.path].major}:{live[each.path].minor} in this machine, but "
        f"{each.major}:{each.minor} was granted"
        for each in request.devices
        if each.path in live and (live[each.path].major, live[each.path].minor) != (each.major, each.minor)
    ]
    if json.dumps(document, sort_keys=True) != json.dumps(wanted, sort_keys=True):
        parts = ", ".join(sorted({name for name, _ in found ^ expected})) or "its kind, version or another key"
        problems.append(f"it is not what this agent writes for the granted nodes: {parts}")
    missing = tuple(sorted(set(request.gpus) - {name for name, _ in expected}))
    if not problems and len(missing) == len(request.gpus):
        problems.append("no device in it is a granted GPU")
    left_out = (each.path for each in request.devices if each.path not in paths and each.pci_address not in missing)
    return Verdict(tuple(problems), missing, tuple(sorted(left_out)), tuple(name for name, _ in devices))


GROUP_FILE = "/etc/group"
NO_GROUP = 2**32 - 1
"""For chown(2), this id means "unchanged", so every group has a lower id."""
GROUP_NUMBER = re.compile(r"[0-9]{1,10}")
"""A group's id. The number of digits is limited, because int() raises ValueError for thousands of them."""


class DrmMachine(MachineVendor):
    """The base class of vendors whose GPUs need only device nodes.

    The class of each vendor adds the vendor's names and the attributes of the vendor's device plugin.
    """

    inputs = (GROUP_FILE,)
    mounts_links = False
    """Whether pods also get the links in /dev/dri/by-path. True if the vendor's own tool gives pods these links."""

    @abstractmethod
    def other_names(self, request: Request) -> dict[str, str]:
        """Return the names that the vendor's own tool gives to GPUs, by PCI address. Pure."""

    def generate(self, system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
        groups = parse_groups(system.read_text(GROUP_FILE)) if system.exists(GROUP_FILE) else {}
        links = {path for path in self.optional_paths(request) if system.exists(path)}
        named = {each.path: group_of(each.kind) for each in request.devices}
        missing = sorted({*named.values()} - groups.keys())
        remark = f"this machine has no group {' and no group '.join(missing)}: the nodes keep the host's group number"
        gids = {path: groups[name] for path, name in named.items() if name in groups}
        spec = render(self.spec_kind, self.other_names(request), request, MachineState(live, gids, links))
        return Generated(spec, (remark,) if missing else ())

    def optional_paths(self, request: Request) -> tuple[str, ...]:
        if not self.mounts_links:
            return ()
        return tuple(link for each in request.devices if (link := dri_link(each.kind, each.pci_address)))

    def verify(
        self, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> Verdict:
        return verify(self.spec_kind, self.other_names(request), spec, request, live, present)

    def allocatable(self, spec: object, request: Request, names: Set[str]) -> tuple[AllocatableDevice, ...]:
        listed = names & {name for name, _ in devices_of(object_of(spec, "the specification"))}
        # GPUs are named by PCI address, because the other names may change at a reboot.
        return tuple(
            AllocatableDevice(gpu, (f"{self.spec_kind}={gpu}",)) for gpu in sorted(request.gpus) if gpu in listed
        )


def parse_groups(text: str) -> dict[str, int]:
    """Return the ids of groups by name, from the text of group(5). Malformed lines are ignored."""
    groups: dict[str, int] = {}
    for line in text.splitlines():
        match line.split(":"):
            case [name, _, number, _] if name and GROUP_NUMBER.fullmatch(number) and int(number) < NO_GROUP:
                groups.setdefault(name, int(number))
    return groups


AMD_PREFIX = "amd.com/"


class AmdMachine(DrmMachine):
    """AMD in the machine."""

    name = "amd"
    spec_kind = "amd.com/gpu"
    rival_spec = "/var/run/cdi/amd.json"
    """Written by `amd-ctk cdi generate`."""
    resource_prefix = AMD_PREFIX
    plugin_sockets = "amd.com_*"
    """The sockets' names do not end in `.sock` (dpm/plugin.go of the library that AMD's plugin uses)."""

    def other_names(self, request: Request) -> dict[str, str]:
        """Return each GPU's number, by PCI address. Like `amd-ctk`, count the GPUs in the order of PCI addresses.

        A new GPU changes the numbers of the GPUs after it.
        """
        return {gpu: str(index) for index, gpu in enumerate(sorted(request.gpus))}

    def gpu_of(self, name: str, request: Request) -> str:
        """Return `name` if it is a PCI address, which is how AMD's plugin names a GPU; otherwise an empty id.

        The names of partitions, for example, are not PCI addresses.
        """
        return name if PCI_ADDRESS.fullmatch(name) else ""


RESOURCE_PREFIX = "gpu.intel.com/"
"""Of Intel's device plugin (cmd/gpu_plugin): `gpu.intel.com/i915` and `gpu.intel.com/xe`, after the kernel driver."""
HARMLESS_RESOURCES = ("gpu.intel.com/monitoring", "gpu.intel.com/*_monitoring")
"""Patterns (fnmatch) of resources with which a pod can monitor all GPUs. By default, the plugin now offers only the
resource that the first pattern matches. Earlier plugins, and a plugin with `-monitoring-mode=split`, offer a resource
for each kernel driver, which the second pattern matches."""


CARD = re.compile(r"(card[0-9]+)(?:-[0-9]+)?")
"""A device id of Intel's device plugin (cmd/gpu_plugin): the card's name. If pods can share cards, the share's number
follows."""


class IntelMachine(DrmMachine):
    """Intel in the machine."""

    name = "intel"
    spec_kind = "intel.com/gpu"
    mounts_links = True
    resource_prefix = RESOURCE_PREFIX
    harmless_resources = HARMLESS_RESOURCES
    plugin_sockets = "gpu.intel.com-*.sock"
    """See pkg/deviceplugin/server.go of intel-device-plugins-for-kubernetes."""
    plugin_rescans = True
    """The plugin searches for GPUs every five seconds (scanInterval of cmd/gpu_plugin)."""

    def other_names(self, request: Request) -> dict[str, str]:
        """Return `cardN` for each GPU. The numbers may change with each boot."""
        cards = [each for each in request.devices if each.kind == DeviceKind.DRI_CARD]
        return {each.pci_address: posixpath.basename(each.path) for each in cards}

    def gpu_of(self, name: str, request: Request) -> str:
        """Return the PCI address of the GPU that `name` stands for; empty if `name` is not a GPU's.

        For a card that is not granted, return the card's name `cardN`: the plugin may still advertise a card that is no
        longer granted.
        """
        if PCI_ADDRESS.fullmatch(name):
            return name
        match = CARD.fullmatch(name)
        if match is None:
            return ""
        path = f"/dev/dri/{match[1]}"
        return next((each.pci_address for each in request.devices if each.path == path), match[1])
