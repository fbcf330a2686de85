"""`unbounded-agent gpus attach`: gives a detached GPU back, and lets machines open a GPU again that was repaired."""

import argparse

from agent.cli.detach import Ending, Removal, Timing, has_reported, print_ending
from agent.cli.granted_gpus import granted_to
from agent.cli.holders import find_gpu
from agent.cli.wiring import reconciler_for
from agent.host.apply.steps import perform
from agent.host.observe.machine_report import Report, read_report
from agent.host.outcome import MachineOutcome
from agent.host.reconcile import Reconciler
from agent.host.state.gpu_faults import forget_fault
from agent.host.state.locks import pass_lock
from agent.model.actions import WriteFile
from agent.model.conditions import ConditionType, Status
from agent.model.facts import Gpu, MachineFacts
from agent.model.paths import granted_file, handoff_file
from agent.model.reasons import Reason

NOT_REGISTERED = (Reason.FABRIC_REGISTERING, Reason.FABRIC_NOT_REGISTERED, Reason.FABRIC_FAILED)
"""Reasons of FabricReady that rest on what GPUs say. A reset may have changed it."""


def run_attach(options: argparse.Namespace) -> int:
    """Run `gpus attach` with these options."""
    return print_ending(attach(options.address, reconciler_for(options)))


def attach(address: str, reconciler: Reconciler, timing: Timing = Timing()) -> Ending:
    """Undo a detachment, forget the GPU's last fatal error, and wait until the machines have the GPU.

    If the GPU is not detached, machines that fail to open a GPU try again at once.

    Raises ConfigError for an unknown address, or another AgentError.
    """
    facts, planned, _ = reconciler.preview()
    gpu = find_gpu(address, facts)
    recovered = _forget_fault(gpu.pci_address, reconciler)
    if not gpu.detached and gpu.pci_address not in facts.gpus.tainted:
        return _open_again(gpu, recovered, reconciler, timing)
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


def _open_again(gpu: Gpu, recovered: tuple[str, ...], reconciler: Reconciler, timing: Timing) -> Ending:
    """Let the machines try again that have the GPU and fail to open a GPU: nothing else tells them of a reset."""
    address, outcome = gpu.pci_address, reconciler.reconcile()
    have = {each.name: each for each in outcome.machines if address in each.gpus}
    names = tuple(each.name for each in outcome.facts.machines if each.name in have and _fails(each, have[each.name]))
    if not names:
        return Ending(True, recovered or (f"{address} is not detached: nothing to do",))
    removal = Removal(gpu, names, (), reconciler, timing)
    with pass_lock(reconciler.system, reconciler.progress):
        # As in agent.host.plan.diff, the record comes first: its time shows when the handoff was last published.
        for path in (file(name) for name in names for file in (granted_file, handoff_file)):
            perform(WriteFile(path, reconciler.system.read_untrusted(path)[0]), reconciler.system)
    removal.passes(f"open {address} again", removal.not_reported)
    what = f"is not detached; asked {', '.join(names)} to open it again: see `unbounded-agent status`"
    return Ending(not removal.remarks, (*recovered, f"{address} {what}", *removal.remarks))


def _fails(machine: MachineFacts, outcome: MachineOutcome) -> bool:
    """Return whether a running machine reports of its present handoff that it cannot open, or serve, all its GPUs.

    What else the host finds does not count: a machine with a foreign settings file, for example, has no handoff.
    """
    report, kinds = read_report(machine), (ConditionType.DEVICES_ALLOWED, ConditionType.CDI_SPEC_CURRENT)
    if machine.ended or not isinstance(report, Report) or not has_reported(machine):
        return False
    unregistered = any(each.reason in NOT_REGISTERED for each in outcome.conditions)
    return unregistered or any(each.type in kinds and each.status is Status.FALSE for each in report.conditions)
