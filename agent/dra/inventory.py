"""Keeps the devices that this node can offer, as the documents of both halves and the vendors' tools describe them.

The machine half's document lists the allocatable devices, and the host half's has the GPUs' states.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from agent.model import contract
from agent.model.contract import AllocatableDevice, AllocatableVendor, Effect, GpuState, GpuStatus, slice_name
from agent.model.errors import AgentError, DocumentError
from agent.model.paths import ALLOCATABLE, DRA_DRIVER, GPU_STATES_NAME, MACHINE_HANDOFF_DIRECTORY
from agent.system.files import System
from agent.vendors.dra_vendor import Attribute, DeviceFacts
from agent.vendors.drm.dra import AMD, INTEL
from agent.vendors.nvidia.dra import NVIDIA

log = logging.getLogger(__name__)

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


class Taint(NamedTuple):
    """Keeps claims that do not tolerate it away from a device (DeviceTaint of resource.k8s.io)."""

    key: str
    value: str
    effect: Effect
    since: int = 0
    """When the taint was added, in seconds since the epoch; 0 if unknown."""


class Device(NamedTuple):
    """One device that a claim can have."""

    name: str
    """Made of the PCI address and the partition's numbers, so it stays the same while the device is in its slot."""
    vendor: str
    cdi_names: tuple[str, ...]
    pci_address: str
    attributes: Mapping[str, Attribute] = MappingProxyType({})
    capacity: Mapping[str, int] = MappingProxyType({})
    """Bytes, by the capacity's name, such as `memory`."""
    taints: tuple[Taint, ...] = ()
    health: Health = Health.UNKNOWN
    health_message: str = ""
    """What is wrong with the device, or that it is detached or being detached; empty otherwise."""
    shared: bool = False
    """Whether several claims may have the device, each with the part of its capacity that it requests. A claim that
    requests no part gets all of it."""


def make_devices(
    vendors: Iterable[AllocatableVendor],
    states: Mapping[str, GpuStatus],
    facts: Mapping[tuple[AllocatableDevice, str], DeviceFacts],
) -> dict[str, Device]:
    """Return the devices by name. `states` is by PCI address, and `facts` by device and driver version.

    If a GPU has partitions, only the partitions become devices, and the whole GPU does not: a claim for the whole GPU
    would also get the partitions that other claims have.
    """
    devices = {}
    for vendor in vendors:
        divided = {each.pci_address for each in vendor.devices if each.partition}
        for each in sorted(vendor.devices):
            if each.partition or each.pci_address not in divided:
                known = facts.get((each, vendor.driver_version)) or DeviceFacts()
                device = _device(vendor.vendor, each, states.get(each.pci_address), known)
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
    name = slice_name(source.pci_address, source.partition)
    device = Device(name, vendor, source.cdi_names, source.pci_address, attributes, facts.capacity)
    if state is None:
        return device
    if state.pcie_root:
        attributes[PCIE_ROOT] = state.pcie_root
    if state.kernel_driver:
        attributes["kernelDriver"] = state.kernel_driver
    if state.numa_node >= 0:
        attributes[NUMA_NODE] = state.numa_node
    taint = Taint(f"{DRA_DRIVER}/{state.state}", state.reason, state.effect or Effect.NO_SCHEDULE, state.since)
    healthy = state.state is GpuState.HEALTHY
    return device._replace(
        taints=() if healthy else (taint,),
        # A GPU that is being detached (DRAINING) works until it is gone.
        health=Health.UNHEALTHY if state.state in (GpuState.UNHEALTHY, GpuState.LOST) else Health.HEALTHY,
        health_message="" if healthy else state.message,
        # If the capacity is unknown, the GPU is not shared, because nothing would limit the number of its claims.
        shared=state.shared and not source.partition and bool(facts.capacity),
    )


DRA_VENDORS = {each.name: each for each in (NVIDIA, AMD, INTEL)}
GPU_STATES = f"{MACHINE_HANDOFF_DIRECTORY}/{GPU_STATES_NAME}"
RETRY = 120.0
"""Seconds after which a vendor's tool whose answer was not complete is run again: for one dead GPU, it may have to run
once for each of them."""
REFRESH = 3600.0
"""Seconds after which a vendor's tool is run again although its last answer was complete: turning ECC on or off changes
a GPU's memory, and even a complete answer may lack an optional attribute."""

T = TypeVar("T")


class Inventory:
    """The node's devices. Threads may share it: claims are checked with the same documents as slices are made from."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._lock = threading.Lock()
        self.vendors: tuple[AllocatableVendor, ...] = ()
        """The vendors, with the allocatable devices of each."""
        self._states: dict[str, GpuStatus] = {}
        self._unusable: dict[str, str] = {}
        """By path, why a document cannot be used. The earlier content of that document stays in use."""
        self._facts: dict[tuple[AllocatableDevice, str], DeviceFacts] = {}
        """By device and driver version."""
        self._asked: dict[str, float] = {}
        """By vendor, when the tool was last run, by time.monotonic()."""
        self._failed: dict[str, str] = {}
        """By vendor, why the tool failed when it was last run."""
        self._allowed: frozenset[str] = frozenset()
        self._changed = False
        """Whether the documents have changed since the last call of `refresh`."""

    def refresh(self) -> bool:
        """Read the documents again, and return whether they have changed since the last call."""
        with self._lock:
            self._refresh()
            changed, self._changed = self._changed, False
            return changed

    def allow(self, vendors: Iterable[str]) -> None:
        """Set the vendors whose devices may be offered. Before the first call, there are none."""
        with self._lock:
            self._allowed = frozenset(vendors)

    def devices(self) -> dict[str, Device]:
        """Return, by name, the devices that a claim may get now."""
        with self._lock:
            self._refresh()
            return {name: each for name, each in self._all().items() if each.vendor in self._allowed}

    def all_devices(self) -> dict[str, Device]:
        """Return all devices by name, even those that are not offered, because pods may still have them."""
        with self._lock:
            return self._all()

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences on documents that cannot be used, and on tools that fail."""
        with self._lock:
            return (*self._unusable.values(), *self._failed.values())

    def read_facts(self) -> bool:
        """Run the vendors' tools if facts are unknown or may be outdated. Return whether that has changed the devices.

        This may take FACTS_LIMIT seconds (agent.vendors.dra_vendor) for each vendor.
        """
        with self._lock:
            vendors, before = self.vendors, self._all()
        for each in vendors:
            if each.devices and self._is_due(each):
                self._ask(each)
        return self.all_devices() != before

    def _is_due(self, listed: AllocatableVendor) -> bool:
        """Return whether facts about a vendor's devices are unknown, as those about a new one, or may be outdated."""
        known = [self._facts.get((each, listed.driver_version)) for each in listed.devices]
        pause = REFRESH if all(facts and facts.complete for facts in known) else RETRY
        return None in known or time.monotonic() - self._asked.get(listed.vendor, -math.inf) >= pause

    def _ask(self, listed: AllocatableVendor) -> None:
        """Run one vendor's tool, and keep what it says about the devices."""
        vendor = DRA_VENDORS.get(listed.vendor)
        found: Mapping[AllocatableDevice, DeviceFacts] = {}
        why, missing = "", list[str]()
        try:
            found = vendor.read_facts(self._system, listed.devices, listed.driver_version) if vendor is not None else {}
        except (AgentError, OSError) as error:
            why = f": {error}"
        self._asked[listed.vendor] = time.monotonic()
        with self._lock:
            for device in listed.devices:
                new = found.get(device, DeviceFacts(complete=vendor is None))
                # A fact from an earlier attempt stays if the new attempt did not find it.
                key = (device, listed.driver_version)
                old = self._facts.get(key, DeviceFacts(complete=False))
                complete = old.complete or new.complete
                self._facts[key] = DeviceFacts(
                    {**old.attributes, **new.attributes}, {**old.capacity, **new.capacity}, complete
                )
                missing += [] if complete else [device.pci_address]
            self._forget()
        if not missing:
            self._failed.pop(listed.vendor, None)
            return
        names = ", ".join(dict.fromkeys(missing))
        problem = f"{listed.vendor}: attributes of {names} are unknown, so the node's ResourceSlices lack them{why}"
        if self._failed.get(listed.vendor) != problem:
            log.warning("%s", problem)
        self._failed[listed.vendor] = problem

    def _all(self) -> dict[str, Device]:
        return make_devices(self.vendors, self._states, self._facts)

    def _refresh(self) -> None:
        before = self.vendors, self._states, self._unusable
        self._unusable = {}
        self.vendors = self._read(ALLOCATABLE, contract.parse_allocatable, (), self.vendors)
        self._states = self._read(GPU_STATES, contract.parse_gpu_states, {}, self._states)
        if (self.vendors, self._states, self._unusable) != before:
            for why in self._unusable.values():
                log.error("%s", why)
            self._changed = True
            self._forget()

    def _forget(self) -> None:
        """Forget facts about devices that are no longer allocatable: the slots may have other GPUs later."""
        current = {(device, vendor.driver_version) for vendor in self.vendors for device in vendor.devices}
        self._facts = {key: facts for key, facts in self._facts.items() if key in current}

    def _read(self, path: str, parse: Callable[[bytes], T], missing: T, before: T) -> T:
        """Return the parsed document; `missing` if there is none, and `before` if it is unusable, with a reason."""
        try:
            return parse(self._system.read(path))
        except FileNotFoundError:
            return missing
        except DocumentError as error:
            self._unusable[path] = f"{path}: {error}"
        except OSError as error:
            self._unusable[path] = f"{path}: cannot be read: {error.strerror}"
        return before
