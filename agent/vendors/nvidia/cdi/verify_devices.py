"""Verifies the devices in a CDI specification: whole GPUs and MIG devices, each with only its own nodes. Pure.

nvidia-ctk names devices by index and by UUID (pkg/nvcdi/namer.go in the toolkit's source): GPUs `0` and `GPU-UUID`, MIG
devices `0:1` and `MIG-UUID`. A GPU in MIG mode is not a device itself.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agent.model.device import DeviceKind
from agent.model.errors import DocumentError
from agent.model.handoff import GrantedDevice, Request
from agent.vendors.cdi.document import devices as devices_of
from agent.vendors.cdi.document import object_of, strings
from agent.vendors.nvidia.device_plugin import UUID
from agent.vendors.nvidia.mig import Instance, parse_instance

EVERY_GPU = "all"
GPU_INDEX, GPU_UUID = re.compile(r"[0-9]+"), re.compile(f"GPU-{UUID}")
MIG_INDEX, MIG_UUID = re.compile(r"[0-9]+:[0-9]+"), re.compile(f"MIG-{UUID}")
PER_GPU = frozenset({DeviceKind.GPU, DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER})

Device = tuple[str, dict[str, Any]]
"""The name and the edits of a device."""


def devices_problems(devices: list[Device], request: Request) -> Iterator[str]:
    """Yield what is wrong with the devices.

    Each GPU or MIG device must be listed twice, by index and by UUID, and the device `all` must have all their nodes.
    """
    granted = {device.path: device for device in request.devices}
    by_index: list[str] = []
    by_uuid: list[str] = []
    every: set[str] = set()
    for name, edits in devices:
        nodes = [granted[path] for path in sorted(strings(edits, "deviceNodes", "path") & set(granted))]
        yield from _foreign_nodes(name, nodes)
        own = sorted(node.path for node in nodes if node.kind == DeviceKind.GPU or _instance(node))
        if name == EVERY_GPU:
            every = set(own)
            continue
        yield from _own_problems(name, nodes)
        if GPU_INDEX.fullmatch(name) or MIG_INDEX.fullmatch(name):
            by_index.append(" ".join(own))
        elif GPU_UUID.fullmatch(name) or MIG_UUID.fullmatch(name):
            by_uuid.append(" ".join(own))
        else:
            yield f"device {name} is neither an index nor a UUID"
    if sorted(by_index) != sorted(by_uuid) or every != {path for each in by_index for path in each.split()}:
        yield f"GPUs by index {by_index}, by UUID {by_uuid} and in {EVERY_GPU!r} {sorted(every)} differ"


def _own_problems(name: str, nodes: list[GrantedDevice]) -> Iterator[str]:
    """Yield what is wrong with one device. Each must have one GPU node; MIG devices also need two capability nodes."""
    count = sum(node.kind == DeviceKind.GPU for node in nodes)
    if count != 1:
        yield f"device {name} has {count} GPU nodes, not one"
    instances = [instance for node in nodes if (instance := _instance(node))]
    if is_mig_name(name):
        if not _is_mig_device(instances):
            what = ", ".join(map(str, instances)) or "none"
            yield f"device {name} needs the capabilities of one GPU instance and one compute instance, but has {what}"
    elif instances:
        yield f"device {name} is a whole GPU, but has the MIG capability {instances[0]}"


def _foreign_nodes(name: str, nodes: list[GrantedDevice]) -> Iterator[str]:
    """Yield a problem for each node that belongs to another GPU or to no single GPU (MIG configuration, NVSwitch)."""
    gpus = {node.pci_address for node in nodes if node.kind == DeviceKind.GPU}
    for node in nodes:
        if node.kind not in PER_GPU and not _instance(node):
            yield f"device {name} has the {node.kind} node {node.path}, which does not belong to any one GPU"
        elif gpus and node.pci_address not in gpus:
            yield f"device {name} has {node.path}, which belongs to GPU {node.pci_address}"


def is_gpu_name(name: str) -> bool:
    """Return whether the device is EVERY_GPU, a GPU or a MIG device, according to its name."""
    return name == EVERY_GPU or any(each.fullmatch(name) for each in (GPU_INDEX, GPU_UUID, MIG_INDEX, MIG_UUID))


def is_mig_name(name: str) -> bool:
    return bool(MIG_INDEX.fullmatch(name) or MIG_UUID.fullmatch(name))


def is_partition(device: GrantedDevice) -> bool:
    """Return whether a granted node is the capability of a MIG instance."""
    return _instance(device) is not None


def _instance(device: GrantedDevice) -> Instance | None:
    # Without a PCI address, the capability's GPU is unknown.
    return parse_instance(device.capability) if device.pci_address else None


def _is_mig_device(instances: list[Instance]) -> bool:
    compute = [each for each in instances if each.ci is not None]
    return len(instances) == 2 and len(compute) == 1 and compute[0].gpu_instance in instances


def missing_gpus(devices: list[Device], request: Request) -> tuple[str, ...]:
    """Return the PCI addresses of the granted GPUs that no device contains."""
    served = {path for _, edits in devices for path in strings(edits, "deviceNodes", "path")}
    found = {
        device.pci_address for device in request.devices if device.kind == DeviceKind.GPU and device.path in served
    }
    return tuple(gpu for gpu in request.gpus if gpu not in found)


def missing_partitions(devices: list[Device], request: Request) -> dict[str, str]:
    """Return the granted MIG devices that the specification does not have, such as `gi1/ci0 of 0000:01:00.0`.

    The values are their GPUs.
    """
    served = {path for _, edits in devices for path in strings(edits, "deviceNodes", "path")}
    return {
        f"{instance} of {device.pci_address}": device.pci_address
        for device in request.devices
        if (instance := _instance(device)) and instance.ci is not None and device.path not in served
    }


def without_incomplete(spec: object, request: Request) -> tuple[object, tuple[str, ...]]:
    """Return the specification without incomplete MIG devices, and the names of the removed devices.

    A MIG device is incomplete if the node of one of its two capabilities is missing: nvidia-ctk only warns if it does
    not find a node. It is also incomplete if it has a node that is not granted: NVML may list MIG devices that were
    made after the handoff. A malformed specification is returned as it is: `verify` reports it.
    """
    try:
        document = object_of(spec, "the specification")
        found = devices_of(document)
        granted = {device.path: device for device in request.devices}
        incomplete = [name for name, edits in found if is_mig_name(name) and not _is_complete(edits, granted)]
        kept = [(name, edits) for name, edits in found if name != EVERY_GPU and name not in incomplete]
        merged = _merged(edits for _, edits in kept) if incomplete else {}
    except DocumentError:
        return spec, ()
    if not incomplete:
        return spec, ()
    if kept:
        kept.append((EVERY_GPU, merged))
    listed = [{"name": name, "containerEdits": edits} for name, edits in kept]
    return document | {"devices": listed}, tuple(incomplete)


def _is_complete(edits: dict[str, Any], granted: Mapping[str, GrantedDevice]) -> bool:
    paths = strings(edits, "deviceNodes", "path")
    instances = [instance for path in paths & set(granted) if (instance := _instance(granted[path]))]
    return paths <= set(granted) and _is_mig_device(instances)


def _merged(all_edits: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the edits for the device `all` as nvidia-ctk makes them: each entry once."""
    merged: dict[str, Any] = {}
    for edits in all_edits:
        for key, value in edits.items():
            if not isinstance(value, list):
                raise DocumentError(f"{key} is not a list")
            entries = merged.setdefault(key, [])
            entries += [entry for entry in value if entry not in entries]
    return merged
