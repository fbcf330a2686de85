"""Judges a CDI spec that nvidia-ctk generated. Pure.

The format is specs-go/config.go of the Container Device Interface. nvidia-ctk ends with exit code 0 also when it left
out all libraries, so nothing is believed that was not looked at.
"""

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from agent.errors import DocumentError
from agent.handoff import GrantedDevice, Request
from agent.identity import DeviceKind, DeviceNumber
from agent.vendors.machine_protocol import Verdict
from agent.vendors.nvidia.cdi_document import devices as devices_of
from agent.vendors.nvidia.cdi_document import object_of, objects, strings
from agent.vendors.nvidia.cdi_edits import Ground, edits_problems

KIND = "nvidia.com/gpu"
EVERY_GPU = "all"
NO_GPU = "none"
"""What nvidia-container-runtime in mode cdi looks for when a container has NVIDIA_VISIBLE_DEVICES=none, which many
images have: the driver's files and the nodes that all GPUs share. Without the device such a container fails to start.
`nvidia-ctk cdi generate` makes it only alone, so that it is added to the spec."""
NO_GPU_EDITS = {"env": ["NVCT_EMPTY_DEVICE="]}
"""As nvidia-ctk has it for specs in memory (lib-nvml.go), since a CDI device without any edits is not valid."""

COMMON = frozenset({DeviceKind.CONTROL, DeviceKind.UVM})
"""Nodes without which no GPU computes, for every device of the spec."""
SHARED = COMMON | {DeviceKind.UVM_TOOLS, DeviceKind.MODESET}
"""All that nvidia-ctk puts into every container (common-nvml.go); they give access to no GPU by themselves."""
PER_GPU = frozenset({DeviceKind.GPU, DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER})
UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
NEEDED_LIBRARIES = ("libcuda.so", "libnvidia-ml.so")


def verify(spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]) -> Verdict:
    """The verdict on a spec for one request; a spec that has not its form has one problem, which names the place."""
    try:
        document = object_of(spec, "the spec")
        common = object_of(document.get("containerEdits", {}), "containerEdits")
        devices = devices_of(document)
        with_gpus = [each for each in devices if each != (NO_GPU, NO_GPU_EDITS)]
        ground = Ground(request, live, present)
        problems = [
            *_header_problems(document),
            *edits_problems("containerEdits", common, ground),
            *(each for name, edits in with_gpus for each in edits_problems(f"device {name}", edits, ground)),
            *_common_problems(common, request),
            *_library_problems(common, request),
            *_name_problems(with_gpus, request),
        ]
        missing = _missing_gpus(devices, request)
    except DocumentError as error:
        return Verdict(problems=(error.message,))
    if not problems and len(missing) == len(request.gpus):
        problems.append("no device of the spec is a granted GPU")
    return Verdict(tuple(problems), missing, _left_out(common, devices, request), tuple(name for name, _ in devices))


def host_paths(spec: object) -> tuple[str, ...]:
    """The host paths of all mounts; those of a malformed spec are left to `verify`."""
    try:
        document = object_of(spec, "the spec")
        edits = [
            object_of(document.get("containerEdits", {}), "containerEdits"),
            *(each for _, each in devices_of(document)),
        ]
        mounts = [mount for each in edits for mount in objects(each, "mounts")]
    except DocumentError:
        return ()
    return tuple(path for mount in mounts if isinstance(path := mount.get("hostPath"), str))


def _left_out(common: dict[str, Any], devices: list[tuple[str, dict[str, Any]]], request: Request) -> tuple[str, ...]:
    """Files of the driver root and nodes of the grant that no device of the spec has."""
    mounted = strings(common, "mounts", "hostPath")
    nodes = {
        path for edits in (common, *(each for _, each in devices)) for path in strings(edits, "deviceNodes", "path")
    }
    files = (file.target for file in request.files if not file.link)
    return (
        *sorted(file for file in files if f"{request.driver_root}/{file}" not in mounted),
        *sorted(
            device.path for device in request.devices if device.path not in nodes and device.kind != DeviceKind.GPU
        ),
    )


def _header_problems(document: dict[str, Any]) -> Iterator[str]:
    if document.get("kind") != KIND:
        yield f"kind is {document.get('kind')!r}, not {KIND}"
    if not isinstance(document.get("cdiVersion"), str):
        yield "cdiVersion is missing"
    foreign = sorted(set(document) - {"cdiVersion", "kind", "devices", "containerEdits"})
    if foreign:
        yield f"unknown key {', '.join(foreign)}"


def _common_problems(common: dict[str, Any], request: Request) -> Iterator[str]:
    present = strings(common, "deviceNodes", "path")
    kinds = {device.path: device.kind for device in request.devices}
    for kind in sorted(COMMON - {kinds.get(path) for path in present}):
        yield f"no {kind} node, without which no container computes"
    for path in sorted(path for path, kind in kinds.items() if kind in COMMON and path not in present):
        yield f"device node {path} is not in it"
    for path in sorted(path for path in present if path in kinds and kinds[path] not in SHARED):
        yield f"every container would get the {kinds[path]} node {path}"


def _library_problems(common: dict[str, Any], request: Request) -> Iterator[str]:
    mounted = strings(common, "mounts", "hostPath")
    names = [posixpath.basename(path) for path in mounted]
    for library in NEEDED_LIBRARIES:
        if not any(name.startswith(f"{library}.") for name in names):
            yield f"{library} is not in it"
    native = [
        posixpath.dirname(file.target)
        for file in request.files
        if posixpath.basename(file.target) == f"libcuda.so.{request.driver_version}" and "i386" not in file.target
    ]
    for file in request.files:
        directory = posixpath.dirname(file.target)
        belongs = any(directory in (each, f"{each}/vdpau") for each in native)
        versioned = file.target.endswith(f".so.{request.driver_version}")
        if belongs and versioned and not file.link and f"{request.driver_root}/{file.target}" not in mounted:
            yield f"library {file.target} is not in it"


def _name_problems(devices: list[tuple[str, dict[str, Any]]], request: Request) -> Iterator[str]:
    """Each GPU has one name by index and one by UUID, and `all` has them all."""
    gpus = {device.path: device for device in request.devices if device.kind == DeviceKind.GPU}
    by_index: list[str] = []
    by_uuid: list[str] = []
    for name, edits in devices:
        nodes = sorted(strings(edits, "deviceNodes", "path") & set(gpus))
        yield from _other_nodes(name, edits, gpus, nodes, request)
        if name == EVERY_GPU:
            continue
        if len(nodes) != 1:
            yield f"device {name} has {len(nodes)} GPU nodes, not one"
        elif name.isdecimal():
            by_index += nodes
        elif UUID.fullmatch(name):
            by_uuid += nodes
        else:
            yield f"device {name} is neither an index nor a UUID"
    paths = {path for name, edits in devices if name == EVERY_GPU for path in strings(edits, "deviceNodes", "path")}
    every = sorted(paths & set(gpus))
    if not sorted(by_index) == sorted(by_uuid) == every:
        yield f"GPUs by index {by_index}, by UUID {by_uuid} and in {EVERY_GPU!r} {every} differ"


def _other_nodes(
    name: str, edits: dict[str, Any], gpus: Mapping[str, GrantedDevice], nodes: list[str], request: Request
) -> Iterator[str]:
    """Nodes that are not the own GPU's: of another GPU, or of none (MIG configuration, NVSwitch)."""
    granted = {device.path: device for device in request.devices}
    own = {gpus[path].pci_address for path in nodes}
    for path in sorted(strings(edits, "deviceNodes", "path") & set(granted)):
        device = granted[path]
        if device.kind not in PER_GPU:
            yield f"device {name} has the {device.kind} node {path}"
        elif own and device.pci_address not in own:
            yield f"device {name} has {path}, which belongs to GPU {device.pci_address}"


def _missing_gpus(devices: list[tuple[str, dict[str, Any]]], request: Request) -> tuple[str, ...]:
    served = {path for _, edits in devices for path in strings(edits, "deviceNodes", "path")}
    found = {
        device.pci_address for device in request.devices if device.kind == DeviceKind.GPU and device.path in served
    }
    return tuple(gpu for gpu in request.gpus if gpu not in found)
