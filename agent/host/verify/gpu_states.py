"""Evaluates the state of each GPU that a machine offers by Dynamic Resource Allocation. Pure."""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from agent.host.vendors import host_vendor
from agent.model.conditions import Reason
from agent.model.contract import Effect, GpuState, GpuStatus
from agent.model.facts import Facts, Gpu, GpuFacts, Placement, Remembered, Seen, VendorFacts
from agent.model.goal import MachineGoal
from agent.model.text import rfc3339

DETACHING = "Detaching"
RECOVERY = "after a reset that neither reboots the host nor reloads the driver, run `unbounded-agent gpus attach {}`"


def gpu_states(
    goal: MachineGoal, facts: Facts, remembered: Seen[Remembered], shared: bool = False
) -> tuple[GpuStatus, ...]:
    """Return the states of the GPUs that the machine has or has lost. GPUs that are detached from it are included.

    `shared` says whether pods may share them.
    """
    present = {gpu.pci_address: gpu for vendor in facts.vendors for gpu in vendor.gpus}
    addresses = sorted({address for grant in goal.grants for address in (*grant.gpus, *grant.detached)})
    states = [_state(present[address], facts.gpus) for address in addresses if address in present]
    return tuple(sorted(each._replace(shared=shared) for each in (*states, *_lost(goal, remembered))))


def _state(gpu: Gpu, gpu_facts: GpuFacts) -> GpuStatus:
    state, reason, message, since = _health(gpu, gpu_facts)
    tainted = gpu_facts.tainted.get(gpu.pci_address)
    # Pods stay on a GPU that has failed: they are evicted only if an administrator detaches the GPU.
    effect = Effect.NONE if state is GpuState.HEALTHY else Effect.NO_SCHEDULE
    if tainted is not None:
        effect = Effect.NO_EXECUTE if tainted.evict else Effect.NO_SCHEDULE
        if state is GpuState.HEALTHY:
            state, reason, since = GpuState.DRAINING, DETACHING, tainted.since
            message = "an administrator ran `unbounded-agent gpus detach` for it"
    placement = gpu_facts.placements.get(gpu.pci_address) or Placement()
    return GpuStatus(
        gpu.pci_address,
        gpu.vendor,
        state,
        reason,
        message,
        effect,
        int(since),
        gpu.driver,
        placement.numa_node,
        placement.pcie_root,
    )


def _health(gpu: Gpu, gpu_facts: GpuFacts) -> tuple[GpuState, str, str, float]:
    """Return state, reason, message and time, leaving aside whether the GPU is detached."""
    fault = gpu_facts.faults.get(gpu.pci_address)
    if gpu.why_lost:
        reason, since = (fault.reason, fault.since) if fault else (str(Reason.GPU_FALLEN_OFF_BUS), 0.0)
        return GpuState.LOST, reason, gpu.why_lost, since
    if not gpu.driver:
        return GpuState.UNHEALTHY, str(Reason.NO_DRIVER), "it has no kernel driver", 0.0
    if fault:
        return GpuState.UNHEALTHY, fault.reason, f"{fault.meaning}; {RECOVERY.format(gpu.pci_address)}", fault.since
    return GpuState.HEALTHY, "", "", 0.0


def _lost(goal: MachineGoal, remembered: Seen[Remembered]) -> Iterator[GpuStatus]:
    """Yield the machine's GPUs that left the PCI bus without being detached."""
    if not isinstance(remembered, Remembered):
        return
    for gpu in remembered.gpus:
        if gpu.lost and goal.name in gpu.machines:
            message = f"it left the PCI bus at {rfc3339(gpu.lost)} without `unbounded-agent gpus detach`"
            reason = str(Reason.GPU_LOST)
            yield GpuStatus(
                gpu.pci_address, gpu.vendor, GpuState.LOST, reason, message, Effect.NO_SCHEDULE, int(gpu.lost)
            )


# Lists the host's GPUs with their states, for commands, metrics and pages; docs/json.md describes the states. Pure.


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
