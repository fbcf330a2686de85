"""Judges a CDI spec that nvidia-ctk generated. Pure.

The format is specs-go/config.go of the Container Device Interface. nvidia-ctk ends with exit code 0 also when it left
out all libraries, so nothing is believed that was not looked at.
"""

import posixpath
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from agent.errors import DocumentError
from agent.handoff import Request
from agent.identity import DeviceKind, DeviceNumber
from agent.vendors.cdi_document import devices as devices_of
from agent.vendors.cdi_document import items, object_of, objects, strings
from agent.vendors.machine_protocol import Verdict
from agent.vendors.nvidia.cdi_devices import is_partition, missing_gpus, missing_partitions, name_problems
from agent.vendors.nvidia.cdi_edits import Ground, edits_problems

KIND = "nvidia.com/gpu"
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
            *library_problems(common, request),
            *_environment_problems(common, request),
            *name_problems(with_gpus, request),
        ]
        missing = missing_gpus(devices, request)
    except DocumentError as error:
        return Verdict(problems=(error.message,))
    if not problems and len(missing) == len(request.gpus):
        problems.append("no device of the spec is a granted GPU")
    return Verdict(
        tuple(problems),
        missing,
        _left_out(common, devices, request),
        tuple(name for name, _ in devices),
        missing_partitions(devices, request),
    )


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
            device.path
            for device in request.devices
            if device.path not in nodes and device.kind != DeviceKind.GPU and not is_partition(device)
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


def _environment_problems(common: dict[str, Any], request: Request) -> Iterator[str]:
    """Of what was asked for; anything else is foreign already."""
    present = items(common, "env")
    for variable in request.environment:
        if f"{variable.name}={variable.value}" not in present:
            yield f"environment variable {variable.name} is not set to {variable.value!r}"


def library_problems(common: dict[str, Any], request: Request) -> Iterator[str]:
    """Of the edits that every container with the driver's files gets."""
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
