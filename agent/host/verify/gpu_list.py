"""Lists the host's GPUs with their states, for commands, metrics and pages; docs/json.md describes the states. Pure."""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from agent.host.vendors import host_vendor
from agent.model.facts import Facts, Gpu, VendorFacts
from agent.model.remembered import Remembered

LOST = "lost"


class ListedGpu(Struct, frozen=True):
    """One GPU on the PCI bus, or one that machines have lost."""

    pci_address: str
    vendor: str
    state: str
    machines: tuple[str, ...] = ()
    """Names of the machines that have the GPU, or had it when they lost it."""
    model: str = ""
    uuid: str = ""


def listed_gpus(facts: Facts, granted: Mapping[str, tuple[str, ...]]) -> Iterator[ListedGpu]:
    """Yield the host's GPUs, then the lost ones. `granted` has the names of each GPU's machines, by PCI address."""
    for vendor in facts.vendors:
        for gpu in vendor.gpus:
            machines = granted.get(gpu.pci_address, ())
            yield ListedGpu(
                gpu.pci_address, gpu.vendor, gpu_state(gpu, vendor, machines), machines, gpu.model, gpu.uuid
            )
    if isinstance(facts.remembered, Remembered):
        for lost in facts.remembered.gpus:
            if lost.lost:
                yield ListedGpu(lost.pci_address, lost.vendor, LOST, lost.machines, lost.model, lost.uuid)


def gpu_state(gpu: Gpu, vendor: VendorFacts, machines: tuple[str, ...]) -> str:
    """Return the state of a GPU on the PCI bus. If several states apply, the first of those below counts."""
    if gpu.detached:
        return "detached"
    if gpu.why_lost:
        # It is on the bus, but the kernel log says that it has stopped answering.
        return "failed"
    if not gpu.driver:
        return "no-driver"
    if gpu.driver not in host_vendor(gpu.vendor).drivers:
        return "other-driver"
    if gpu.excluded:
        return "excluded"
    if not isinstance(vendor.devices, tuple):
        return "unknown"
    return "granted" if machines else "free"
