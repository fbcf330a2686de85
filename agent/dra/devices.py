"""Makes the devices that a node offers from what is allocatable, the GPUs' states and the vendors' facts. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from agent.model.allocatable import AllocatableDevice, AllocatableVendor
from agent.model.gpu_states import Effect, GpuState, GpuStatus
from agent.model.paths import DRA_DRIVER
from agent.vendors.dra_vendor import Attribute, DeviceFacts

PCI_BUS_ID = "resource.kubernetes.io/pciBusID"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
NUMA_NODE = "resource.kubernetes.io/numaNode"
"""Attributes with the same name in all drivers (deviceattribute of k8s.io/dynamic-resource-allocation)."""
WHOLE, PARTITION = "gpu", "partition"
"""Values of the attribute `type`, by which a DeviceClass can select whole GPUs."""
PARTITION_NUMBERS = ("gpuInstance", "computeInstance")
"""Attributes with the numbers of a partition."""


class Health(IntEnum):
    """A device's health, for the statuses of pods that have it (HealthStatus of dra-health in k8s.io/kubelet)."""

    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2


@dataclass(frozen=True, slots=True)
class Taint:
    """Keeps claims that do not tolerate it away from a device (DeviceTaint of resource.k8s.io)."""

    key: str
    value: str
    effect: Effect
    since: int = 0
    """When the taint was added, in seconds since the epoch; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a claim can have."""

    name: str
    """Made of the PCI address and the partition's numbers, so it stays the same while the device is in its slot."""
    vendor: str
    cdi_names: tuple[str, ...]
    pci_address: str
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    capacity: Mapping[str, int] = field(default_factory=dict)
    """Bytes, by the capacity's name, such as `memory`."""
    taints: tuple[Taint, ...] = ()
    health: Health = Health.UNKNOWN
    health_message: str = ""
    """What is wrong with the device, or that it is detached or being detached; empty otherwise."""
    shared: bool = False
    """Whether several claims may have the device, each with the part of its capacity that it requests. A claim that
    requests no part gets all of it."""


def device_name(device: AllocatableDevice) -> str:
    """Return the device's name: a label of RFC 1123, unique on the node."""
    address = re.sub("[:.]", "-", device.pci_address)
    return "-".join((f"gpu-{address}", *(("mig", *map(str, device.partition)) if device.partition else ())))


def make_devices(
    vendors: Iterable[AllocatableVendor],
    states: Mapping[str, GpuStatus],
    facts: Mapping[AllocatableDevice, DeviceFacts],
) -> dict[str, Device]:
    """Return the devices by name. `states` is by PCI address.

    If a GPU has partitions, only the partitions become devices, and the whole GPU does not: a claim for the whole GPU
    would also get the partitions that other claims have.
    """
    devices = {}
    for vendor in vendors:
        divided = {each.pci_address for each in vendor.devices if each.partition}
        for each in sorted(vendor.devices):
            if each.partition or each.pci_address not in divided:
                device = _device(vendor.vendor, each, states.get(each.pci_address), facts.get(each) or DeviceFacts())
                devices[device.name] = device
    return devices


def _device(vendor: str, source: AllocatableDevice, state: GpuStatus | None, facts: DeviceFacts) -> Device:
    attributes: dict[str, Attribute] = {
        **facts.attributes,
        **dict(zip(PARTITION_NUMBERS, source.partition, strict=False)),
        "vendor": vendor,
        "type": PARTITION if source.partition else WHOLE,
        PCI_BUS_ID: source.pci_address,
    }
    if state is not None:
        if state.pcie_root:
            attributes[PCIE_ROOT] = state.pcie_root
        if state.kernel_driver:
            attributes["kernelDriver"] = state.kernel_driver
        if state.numa_node >= 0:
            attributes[NUMA_NODE] = state.numa_node
    return Device(
        name=device_name(source),
        vendor=vendor,
        cdi_names=source.cdi_names,
        pci_address=source.pci_address,
        attributes=attributes,
        capacity=facts.capacity,
        taints=_taints(state),
        # If the capacity is unknown, the GPU is not shared, because nothing would limit the number of its claims.
        shared=state is not None and state.shared and not source.partition and bool(facts.capacity),
        health=_health(state),
        health_message=state.message if state is not None and state.state is not GpuState.HEALTHY else "",
    )


def _taints(state: GpuStatus | None) -> tuple[Taint, ...]:
    """Return the taint that keeps new pods from a GPU; none if the GPU is healthy, or its state is unknown.

    If the state names no effect, the taint's effect is NoSchedule.
    """
    if state is None or state.state is GpuState.HEALTHY:
        return ()
    return (Taint(f"{DRA_DRIVER}/{state.state}", state.reason, state.effect or Effect.NO_SCHEDULE, state.since),)


def _health(state: GpuStatus | None) -> Health:
    match state.state if state is not None else None:
        case None:
            return Health.UNKNOWN
        case GpuState.UNHEALTHY | GpuState.LOST:
            return Health.UNHEALTHY
        case _:
            # HEALTHY or DRAINING: a GPU that is being detached works until it is gone.
            return Health.HEALTHY
