"""Verifies a CDI specification that nvidia-ctk generated. Pure.

The format is that of specs-go/config.go of the Container Device Interface. nvidia-ctk exits with 0 even if it leaves
out all libraries, so everything is checked.
"""

import posixpath
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from agent.model.device import DeviceKind, DeviceNumber
from agent.model.errors import DocumentError
from agent.model.handoff import Request
from agent.vendors.cdi.document import devices as devices_of
from agent.vendors.cdi.document import items, object_of, objects, strings
from agent.vendors.machine_vendor import Verdict
from agent.vendors.nvidia.cdi.verify_devices import devices_problems, is_partition, missing_gpus, missing_partitions
from agent.vendors.nvidia.cdi.verify_edits import VOID_VARIABLE, Expectations, edits_problems, flags

KIND = "nvidia.com/gpu"
NO_GPU = "none"
"""A device with the driver's files and the nodes that all GPUs share, but no GPU. Many images set
NVIDIA_VISIBLE_DEVICES=none. For their containers, nvidia-container-runtime in mode cdi requests this device, and if the
device did not exist, the containers would not start. The agent adds the device, because `nvidia-ctk cdi generate` does
not make it if there are GPUs."""
NO_GPU_EDITS = {"env": ["NVCT_EMPTY_DEVICE="]}
"""The edits of NO_GPU, as in the specifications that nvidia-ctk makes in memory (lib-nvml.go). At least one edit
is needed, because a CDI device without any edits is invalid."""

DOCUMENT_KEYS = frozenset({"cdiVersion", "kind", "devices", "containerEdits"})
COMMON = frozenset({DeviceKind.CONTROL, DeviceKind.UVM})
"""Kinds of nodes without which no GPU can compute."""
SHARED = COMMON | {DeviceKind.UVM_TOOLS, DeviceKind.MODESET}
"""Kinds of nodes that nvidia-ctk gives to every container (common-nvml.go). Alone, they give access to no GPU."""
NEEDED_LIBRARIES = ("libcuda.so", "libnvidia-ml.so")


def verify(spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]) -> Verdict:
    """Verify a specification against one request. `live` also has the numbers of nodes that it mounts.

    If the specification is malformed, the verdict has a single problem, which names the malformed part.
    """
    try:
        document = object_of(spec, "the specification")
        common = object_of(document.get("containerEdits", {}), "containerEdits")
        devices = devices_of(document)
        with_gpus = [each for each in devices if each != (NO_GPU, NO_GPU_EDITS)]
        expected = Expectations(request, live, present)
        problems = [
            *header_problems(document, KIND),
            *edits_problems("containerEdits", common, expected),
            *(each for name, edits in with_gpus for each in edits_problems(f"device {name}", edits, expected)),
            *_common_problems(common, request),
            *library_problems(common, request),
            *_environment_problems(common, request),
            *devices_problems(with_gpus, request),
        ]
        missing = missing_gpus(devices, request)
    except DocumentError as error:
        return Verdict(problems=(error.message,))
    if not problems and len(missing) == len(request.gpus):
        problems.append("no device in it is a granted GPU")
    return Verdict(
        tuple(problems),
        missing,
        _left_out(common, devices, request),
        tuple(name for name, _ in devices),
        missing_partitions(devices, request),
    )


def _left_out(common: dict[str, Any], devices: list[tuple[str, dict[str, Any]]], request: Request) -> tuple[str, ...]:
    """Return the files of the driver root, and the granted nodes, that no container gets.

    GPU nodes and nodes of MIG capabilities are not returned, because `verify` lists their GPUs and MIG devices as
    missing.
    """
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


def header_problems(document: dict[str, Any], kind: str) -> Iterator[str]:
    """Yield what is wrong with the top-level keys of a specification whose devices must be of this kind."""
    if document.get("kind") != kind:
        yield f"kind is {document.get('kind')!r}, not {kind}"
    if not isinstance(document.get("cdiVersion"), str):
        yield "cdiVersion is missing"
    foreign = sorted(set(document) - DOCUMENT_KEYS)
    if foreign:
        yield f"unknown key {', '.join(foreign)}"


def _common_problems(common: dict[str, Any], request: Request) -> Iterator[str]:
    present = strings(common, "deviceNodes", "path")
    kinds = {device.path: device.kind for device in request.devices}
    for kind in sorted(COMMON - {kinds.get(path) for path in present}):
        yield f"no {kind} node, without which no container can compute"
    for path in sorted(path for path, kind in kinds.items() if kind in COMMON and path not in present):
        yield f"device node {path} is not in it"
    for path in sorted(path for path in present if path in kinds and kinds[path] not in SHARED):
        yield f"every container would get the {kinds[path]} node {path}"


def _environment_problems(common: dict[str, Any], request: Request) -> Iterator[str]:
    """Yield a problem for each requested variable that is missing. (`edits_problems` refuses unexpected variables.)"""
    present = items(common, "env")
    for variable in request.environment:
        if f"{variable.name}={variable.value}" not in present:
            yield f"environment variable {variable.name} is not set to {variable.value!r}"
    if VOID_VARIABLE not in present:
        yield f"environment variable {VOID_VARIABLE} is not in it, so a pod could get other GPUs of the machine"


def library_problems(common: dict[str, Any], request: Request) -> Iterator[str]:
    """Yield a problem for each missing library, and if the loader in containers would not find libcuda.

    Two sets of libraries must not be missing: NEEDED_LIBRARIES, and the native libraries in the driver root whose names
    end in the driver's version.
    """
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
    listed = {flag for hook in objects(common, "hooks") for flag in flags(items(hook, "args")[2:])}
    for directory in native:
        if ("--folder", f"/{directory}") not in listed:
            yield f"no hook adds /{directory} to the loader's cache of containers"
