"""Writes and verifies the CDI specification of a vendor whose GPUs need only device nodes. Pure.

The format is that of specs-go/config.go of the Container Device Interface. Three things are as in Intel's
cdi-specs-generator (pkg/gpu/cdihelpers): which nodes a device has, its mounts, and the device name `cardN`. Two things
are as in AMD's container toolkit (internal/cdi): the attributes of nodes, and the index as a device name. Each GPU is
also a device named by the GPU's PCI address, because the other names may change at a reboot.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from agent.model.device import DeviceKind, DeviceNumber, dri_link
from agent.model.errors import DocumentError
from agent.model.handoff import GrantedDevice, Request
from agent.vendors.cdi.document import devices as devices_of
from agent.vendors.cdi.document import object_of, objects, strings
from agent.vendors.cdi.version import lowest_version
from agent.vendors.machine_vendor import Verdict

EVERY_GPU = "all"
FOR_ALL_USERS = 0o006
"""Permission bits of a node that every user may read and write."""
GROUPS = {DeviceKind.DRI_CARD: "video"}
OTHER_GROUP = "render"
"""The group of all other nodes: render nodes and /dev/kfd. The groups `video` and `render` are those of systemd's
50-udev-default.rules."""


class MachineState(NamedTuple):
    """What a specification depends on in the machine."""

    live: Mapping[str, DeviceNumber]
    """Numbers, modes and owners of the granted nodes that exist in the machine, by path."""
    groups: Mapping[str, int]
    """The ids of the machine's groups, by name."""
    links: Collection[str]
    """The existing links in /dev/dri/by-path that pods get."""


def render(kind: str, names: Mapping[str, str], request: Request, machine: MachineState) -> dict[str, Any]:
    """Return the specification for the GPUs whose render nodes exist.

    `names` has further names of GPUs, by PCI address. Each GPU is a device under its PCI address and, if it has a
    further name, also under that name. The device EVERY_GPU has the nodes of all these GPUs.
    """
    devices, every = [], []
    for gpu in served(request, machine.live):
        own = [each for each in request.devices if each.pci_address in ("", gpu) and each.path in machine.live]
        every += [each for each in own if each not in every]
        edits = _edits(own, machine)
        devices += [{"name": name, "containerEdits": edits} for name in (names.get(gpu), gpu) if name]
    if devices:
        devices.append({"name": EVERY_GPU, "containerEdits": _edits(every, machine)})
    spec = {"kind": kind, "devices": devices}
    return {"cdiVersion": lowest_version(spec), **spec}


def served(request: Request, live: Mapping[str, DeviceNumber]) -> tuple[str, ...]:
    """Return the PCI addresses of the granted GPUs whose render nodes exist."""
    found = {each.pci_address for each in request.devices if each.kind == DeviceKind.DRI_RENDER and each.path in live}
    return tuple(gpu for gpu in request.gpus if gpu in found)


def group_of(kind: str) -> str:
    """Return the name of the group that owns nodes of this kind."""
    return next((group for each, group in GROUPS.items() if each == kind), OTHER_GROUP)


def _edits(devices: list[GrantedDevice], machine: MachineState) -> dict[str, Any]:
    edits: dict[str, Any] = {"deviceNodes": [_node(each, machine) for each in devices]}
    links = [link for each in devices if (link := dri_link(each.kind, each.pci_address)) in machine.links]
    if links:
        edits["mounts"] = [_mount(link) for link in links]
    # If a runtime may make device nodes, the nodes in the container have the group in the specification. If it may not,
    # it bind-mounts the machine's nodes, which have the host's group. A container's process gets both groups, so it can
    # open the node in either case, even if it is not root.
    restricted = [each for each in devices if machine.live[each.path].mode & FOR_ALL_USERS != FOR_ALL_USERS]
    groups = {gid for each in restricted for gid in (machine.live[each.path].gid, _gid(each, machine))} - {0}
    if groups:
        edits["additionalGids"] = sorted(groups)
    return edits


def _node(device: GrantedDevice, machine: MachineState) -> dict[str, Any]:
    number = machine.live[device.path]
    return {
        "path": device.path,
        "type": "c",
        "major": number.major,
        "minor": number.minor,
        "fileMode": number.mode,
        "permissions": "rw",
        "uid": number.uid,
        "gid": _gid(device, machine),
    }


def _gid(device: GrantedDevice, machine: MachineState) -> int:
    return machine.groups.get(group_of(device.kind), machine.live[device.path].gid)


def _mount(link: str) -> dict[str, Any]:
    return {"hostPath": link, "containerPath": link, "type": "none", "options": ["bind", "rw"]}


def verify(
    kind: str, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
) -> Verdict:
    """Verify a specification against one request.

    If the specification is malformed, the verdict has a single problem, which names the malformed part.
    """
    try:
        document = object_of(spec, "the specification")
        devices = devices_of(document)
        problems = [*_header_problems(document, kind)]
        for name, edits in devices:
            problems += _device_problems(name, edits, request, live, present)
        paths = {path for _, edits in devices for path in strings(edits, "deviceNodes", "path")}
        every = {path for name, edits in devices if name == EVERY_GPU for path in strings(edits, "deviceNodes", "path")}
    except DocumentError as error:
        return Verdict(problems=(error.message,))
    if paths != every:
        problems.append(f"device {EVERY_GPU} does not have all nodes of the others")
    renders = {
        each.pci_address for each in request.devices if each.kind == DeviceKind.DRI_RENDER and each.path in paths
    }
    missing = tuple(gpu for gpu in request.gpus if gpu not in renders)
    if not problems and len(missing) == len(request.gpus):
        problems.append("no device in it is a granted GPU")
    left_out = sorted(
        each.path for each in request.devices if each.path not in paths and each.pci_address not in missing
    )
    return Verdict(tuple(problems), missing, tuple(left_out), tuple(name for name, _ in devices))


def _header_problems(document: dict[str, Any], kind: str) -> Iterator[str]:
    if document.get("kind") != kind:
        yield f"kind is {document.get('kind')!r}, not {kind}"
    if document.get("cdiVersion") != lowest_version(document):
        yield f"cdiVersion is {document.get('cdiVersion')!r}"
    foreign = sorted(set(document) - {"cdiVersion", "kind", "devices"})
    if foreign:
        yield f"unknown key {', '.join(foreign)}"


def _device_problems(
    name: str, edits: dict[str, Any], request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
) -> Iterator[str]:
    where, granted = f"device {name}", {each.path: each for each in request.devices}
    foreign = sorted(set(edits) - {"deviceNodes", "mounts", "additionalGids"})
    if foreign:
        yield f"{where}: unknown key {', '.join(foreign)}"
    found = []
    for node in objects(edits, "deviceNodes"):
        device = granted.get(str(node.get("path")))
        if device is None:
            yield f"{where}: device node {node.get('path')!r} is not granted to this machine"
            continue
        found.append(device)
        yield from _node_problems(where, node, device, live.get(device.path))
    gpus = {each.pci_address for each in found} - {""}
    if not gpus:
        yield f"{where} has no GPU node"
    if len(gpus) > 1 and name != EVERY_GPU:
        yield f"{where} has nodes of {' and '.join(sorted(gpus))}"
    mounts = [_mount(link) for each in found if (link := dri_link(each.kind, each.pci_address)) in present]
    for mount in objects(edits, "mounts"):
        if mount not in mounts:
            yield f"{where}: mount of {mount.get('hostPath')!r}, not the by-path link of one of this device's nodes"
    written = [node.get("gid") for node in objects(edits, "deviceNodes")]
    groups = {number.gid for number in live.values()} | {gid for gid in written if isinstance(gid, int)}
    listed = edits.get("additionalGids", [])
    if not isinstance(listed, list) or not all(type(gid) is int and gid in groups and gid for gid in listed):
        yield f"{where}: additionalGids {listed!r}, which are not groups of its nodes"


def _node_problems(where: str, node: dict[str, Any], device: GrantedDevice, live: DeviceNumber | None) -> Iterator[str]:
    path = device.path
    if live is None:
        yield f"{where}: device node {path} is not in this machine"
        return
    if (live.major, live.minor) != (device.major, device.minor):
        is_now, granted = f"{live.major}:{live.minor}", f"{device.major}:{device.minor}"
        yield f"{where}: device node {path} is {is_now} in this machine, but {granted} was granted"
    # The gid may be any integer, because `_gid` may have chosen another group than that of the machine's node.
    gid = node.get("gid")
    expected = {"type": "c", "major": live.major, "minor": live.minor, "fileMode": live.mode, "uid": live.uid}
    expected |= {"path": path, "permissions": "rw", "gid": gid if type(gid) is int else live.gid}
    # The types are compared too: 1, 1.0 and True are equal in Python.
    if node != expected or any(type(node[key]) is not type(value) for key, value in expected.items()):
        yield f"{where}: device node {path} has unexpected values: {node!r}"
