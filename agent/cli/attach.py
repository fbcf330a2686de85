"""`unbounded-agent gpus attach`: gives a detached GPU back to its machines."""

from agent.cli.detach import Ending, Removal, Timing
from agent.cli.granted_gpus import granted_to
from agent.cli.holders import find_gpu
from agent.host.reconcile import Reconciler
from agent.host.state.gpu_faults import forget_fault
from agent.host.state.locks import pass_lock


def attach(address: str, reconciler: Reconciler, timing: Timing = Timing()) -> Ending:
    """Undo a detachment, forget the GPU's last fatal error, and wait until the machines have the GPU.

    Raises ConfigError for an unknown address, or another AgentError.
    """
    facts, planned, _ = reconciler.preview()
    gpu = find_gpu(address, facts)
    recovered = _forget_fault(gpu.pci_address, reconciler)
    if not gpu.detached and gpu.pci_address not in facts.gpus.tainted:
        return Ending(True, recovered or (f"{gpu.pci_address} is not detached: nothing to do",))
    machines = granted_to(gpu.pci_address, facts, planned, reconciler.config)
    outcome = (removal := Removal(gpu, machines, (), reconciler, timing)).attach_again()
    names = ", ".join(machine.name for machine in outcome.machines if gpu.pci_address in machine.gpus)
    what = f"was given back to {names}" if names else "is no longer detached; no machine's settings ask for it"
    return Ending(not removal.remarks, (f"{gpu.pci_address} {what}", *recovered, *removal.remarks))


def _forget_fault(address: str, reconciler: Reconciler) -> tuple[str, ...]:
    """Forget the GPU's last fatal error, because the administrator knows that the GPU works again.

    Return a sentence that says so; nothing if no error was recorded.
    """
    with pass_lock(reconciler.system, reconciler.progress):
        if not forget_fault(reconciler.system, address):
            return ()
    reconciler.reconcile()
    return (f"{address} counts as healthy again: its last fatal error is forgotten",)
