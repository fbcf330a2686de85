"""The devices that a node offers: what is allocatable, with the host's states and the vendors' facts. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agent.model.allocatable import AllocatableDevice, AllocatableVendor
from agent.model.gpu_states import Effect, GpuState, GpuStatus
from agent.model.paths import DRA_DRIVER
from agent.vendors.dra_vendor import Attribute, DeviceFacts

PCI_BUS_ID = "resource.kubernetes.io/pciBusID"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
"""Names that all drivers share (deviceattribute of k8s.io/dynamic-resource-allocation). Others belong to the driver."""
WHOLE, PARTITION = "gpu", "partition"
"""Values of the attribute `type`. A DeviceClass of whole GPUs selects by it."""
NUMBERS = ("gpuInstance", "computeInstance")
"""Attributes with the numbers of a partition."""


class Health(StrEnum):
    """A device's health, for the statuses of pods that have it (dra-health of k8s.io/kubelet)."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"
    UNKNOWN = "Unknown"


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
    """The same as long as the device is in its slot: made of the PCI address, and of a partition's numbers."""
    vendor: str
    cdi_names: tuple[str, ...]
    pci_address: str
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    capacity: Mapping[str, int] = field(default_factory=dict)
    """Bytes by name."""
    taints: tuple[Taint, ...] = ()
    health: Health = Health.UNKNOWN
    health_message: str = ""
    """What is wrong, and what it means, for people."""
    shared: bool = False
    """Whether several claims may have it, each with a part of its capacity; by default, with all of it."""


def device_name(device: AllocatableDevice) -> str:
    """Return the device's name: a label of RFC 1123, unique in the node."""
    address = re.sub("[:.]", "-", device.pci_address)
    return "-".join((f"gpu-{address}", *(("mig", *map(str, device.partition)) if device.partition else ())))


def make_devices(
    vendors: Iterable[AllocatableVendor],
    states: Mapping[str, GpuStatus],
    facts: Mapping[AllocatableDevice, DeviceFacts],
) -> dict[str, Device]:
    """Return the devices by name.

    A GPU with partitions is none itself: a claim for it would get what other claims have.
    """
    found = {}
    for vendor in vendors:
        divided = {each.pci_address for each in vendor.devices if each.partition}
        for each in sorted(vendor.devices):
            if each.partition or each.pci_address not in divided:
                device = _device(vendor.vendor, each, states.get(each.pci_address), facts.get(each) or DeviceFacts())
                found[device.name] = device
    return found


def _device(vendor: str, source: AllocatableDevice, state: GpuStatus | None, facts: DeviceFacts) -> Device:
    attributes: dict[str, Attribute] = {
        **facts.attributes,
        **dict(zip(NUMBERS, source.partition, strict=False)),
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
            attributes["numaNode"] = state.numa_node
    return Device(
        name=device_name(source),
        vendor=vendor,
        cdi_names=source.cdi_names,
        pci_address=source.pci_address,
        attributes=attributes,
        capacity=facts.capacity,
        taints=_taints(state),
        # Without a known capacity, there would be no limit to the number of claims.
        shared=state is not None and state.shared and not source.partition and bool(facts.capacity),
        health=_health(state),
        health_message=state.message if state is not None and state.state is not GpuState.HEALTHY else "",
    )


def _taints(state: GpuStatus | None) -> tuple[Taint, ...]:
    """Return the taint of a GPU that new pods must not get. A state without an effect still has this one."""
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
            # A GPU that is being detached works until then.
            return Health.HEALTHY
