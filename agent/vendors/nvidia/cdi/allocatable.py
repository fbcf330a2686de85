"""Lists the GPUs and MIG devices of a verified CDI specification that a pod can have. Pure.

A device is named by UUID, because its index changes when another GPU or MIG device is added or removed.
"""

from collections.abc import Set

from agent.model.allocatable import AllocatableDevice
from agent.model.device import DeviceKind
from agent.model.handoff import Request
from agent.vendors.cdi.document import devices, object_of, strings
from agent.vendors.nvidia.cdi.verify import KIND
from agent.vendors.nvidia.cdi.verify_devices import GPU_UUID, MIG_UUID
from agent.vendors.nvidia.mig import parse_instance


def allocatable(spec: object, request: Request, names: Set[str]) -> tuple[AllocatableDevice, ...]:
    """Return the GPUs and MIG devices whose UUIDs are in `names`. Devices named by index, and `all`, are left out.

    If a GPU has MIG devices, only these are returned, and not the GPU itself: otherwise one pod could get the GPU, and
    another pod a part of the same GPU. Raises DocumentError.
    """
    granted = {each.path: each for each in request.devices}
    found: dict[tuple[str, tuple[int, ...]], AllocatableDevice] = {}
    for name, edits in devices(object_of(spec, "the specification")):
        if name not in names or not (GPU_UUID.fullmatch(name) or MIG_UUID.fullmatch(name)):
            continue
        nodes = [granted[path] for path in strings(edits, "deviceNodes", "path") & set(granted)]
        gpus = {each.pci_address for each in nodes if each.kind == DeviceKind.GPU}
        instances = [instance for each in nodes if (instance := parse_instance(each.capability))]
        compute = [(each.gi, each.ci) for each in instances if each.ci is not None]
        # In a verified specification, each device has one GPU node; a MIG device also has one compute instance, and a
        # whole GPU has none. If that is not so, the file has changed since it was verified: skip the device.
        if len(gpus) == 1 and len(compute) == bool(MIG_UUID.fullmatch(name)):
            (gpu,), partition = gpus, compute[0] if compute else ()
            found[gpu, partition] = AllocatableDevice(gpu, (f"{KIND}={name}",), partition)
    partitioned = {gpu for gpu, partition in found if partition}
    return tuple(sorted(each for (gpu, partition), each in found.items() if partition or gpu not in partitioned))
