"""Evaluates the state of each GPU that a machine offers by Dynamic Resource Allocation. Pure."""

from collections.abc import Iterator

from agent.model.facts import Facts, Gpu, Seen
from agent.model.goal import MachineGoal
from agent.model.gpu_facts import GpuFacts, Placement
from agent.model.gpu_states import Effect, GpuState, GpuStatus
from agent.model.reasons import Reason
from agent.model.remembered import Remembered
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
