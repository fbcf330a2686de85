"""Evaluates the states of GPUs: those that a machine offers by Dynamic Resource Allocation, and the host's. Pure."""

from collections.abc import Iterator, Mapping

from msgspec.structs import asdict

from agent.host.vendors import host_vendor
from agent.model.conditions import Reason
from agent.model.contract import Effect, GpuState, GpuStatus
from agent.model.facts import Facts, Gpu, GpuFacts, Placement, Remembered, RememberedGpu, Seen, VendorFacts
from agent.model.goal import MachineGoal
from agent.model.text import rfc3339

DETACHING = "Detaching"
RECOVERY = "after a reset that neither reboots the host nor reloads the driver, run `unbounded-agent gpus attach {}`"


def gpu_states(
    goal: MachineGoal, facts: Facts, remembered: Seen[Remembered], shared: bool = False
) -> tuple[GpuStatus, ...]:
    """Return the states of the GPUs that the machine has, has lost, or that are detached from it.

    `shared` says whether pods may share them.
    """
    present = {gpu.pci_address: gpu for vendor in facts.vendors for gpu in vendor.gpus}
    addresses = {address for grant in goal.grants for address in (*grant.gpus, *grant.detached)}
    states = [_state(present[address], facts.gpus) for address in addresses if address in present]
    for gpu in remembered.gpus if isinstance(remembered, Remembered) else ():
        if gpu.lost and goal.name in gpu.machines:
            why = f"it left the PCI bus at {rfc3339(gpu.lost)} without `unbounded-agent gpus detach`"
            lost, since = (GpuState.LOST, str(Reason.GPU_LOST), why, Effect.NO_SCHEDULE), int(gpu.lost)
            states.append(GpuStatus(gpu.pci_address, gpu.vendor, *lost, since))
    return tuple(sorted(each._replace(shared=shared) for each in states))


def _state(gpu: Gpu, gpu_facts: GpuFacts) -> GpuStatus:
    fault, tainted = gpu_facts.faults.get(gpu.pci_address), gpu_facts.tainted.get(gpu.pci_address)
    fault = fault if fault and fault.verdict.fenced else None
    state, reason, message, since = GpuState.HEALTHY, "", "", 0.0
    if gpu.why_lost:
        reason, since = (fault.reason, fault.since) if fault else (str(Reason.GPU_FALLEN_OFF_BUS), 0.0)
        state, message = GpuState.LOST, gpu.why_lost
    elif not gpu.driver:
        state, reason, message = GpuState.UNHEALTHY, str(Reason.NO_DRIVER), "it has no kernel driver"
    elif fault:
        message = f"{fault.meaning}; {RECOVERY.format(gpu.pci_address)}"
        state, reason, since = GpuState.UNHEALTHY, fault.reason, fault.since
    # Pods stay on a GPU that has failed: they are evicted only if an administrator detaches the GPU.
    effect = Effect.NONE if state is GpuState.HEALTHY else Effect.NO_SCHEDULE
    if tainted is not None:
        effect = Effect.NO_EXECUTE if tainted.evict else Effect.NO_SCHEDULE
        if state is GpuState.HEALTHY:
            state, reason, since = GpuState.DRAINING, DETACHING, tainted.since
            message = "an administrator ran `unbounded-agent gpus detach` for it"
    place = gpu_facts.placements.get(gpu.pci_address) or Placement()
    found = (state, reason, message, effect, int(since), gpu.driver, place.numa_node, place.pcie_root)
    return GpuStatus(gpu.pci_address, gpu.vendor, *found)


LOST = "lost"


class ListedGpu(RememberedGpu, frozen=True):
    """One GPU on the PCI bus, or one that machines have lost; docs/json.md describes the states."""

    state: str = ""


def listed_gpus(facts: Facts, granted: Mapping[str, tuple[str, ...]]) -> Iterator[ListedGpu]:
    """Yield the host's GPUs, then the lost ones. `granted` has the names of each GPU's machines, by PCI address."""
    for vendor in facts.vendors:
        for gpu in vendor.gpus:
            machines = granted.get(gpu.pci_address, ())
            known = (gpu.pci_address, gpu.vendor, gpu.model, gpu.uuid, machines)
            yield ListedGpu(*known, state=gpu_state(gpu, vendor, machines))
    for lost in facts.remembered.gpus if isinstance(facts.remembered, Remembered) else ():
        if lost.lost:
            yield ListedGpu(**asdict(lost), state=LOST)


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
