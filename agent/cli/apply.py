"""`unbounded-agent apply`: makes one pass, starts stopped machines, and waits for their reports."""

import argparse
import time
from contextlib import ExitStack

from agent.cli.output import print_machines, report_problems, started_and_stopped
from agent.cli.printing import progress, report_failures
from agent.cli.wiring import reconciler_for
from agent.host.outcome import MachineOutcome, Outcome
from agent.host.reconcile import Reconciler
from agent.host.state.locks import COMMAND_WAIT, machine_locks
from agent.model.conditions import Status
from agent.model.errors import AgentError

ANSWER_LIMIT = 180.0
"""Seconds that `apply` waits for machines to boot and report, in addition to their longest driver_wait."""
PROGRESS_INTERVAL = 15.0
"""Seconds between two progress messages."""


def run_apply(options: argparse.Namespace) -> int:
    """Run `apply` with these options."""
    return apply(reconciler_for(options))


def apply(reconciler: Reconciler) -> int:
    """Make a pass, start stopped machines, wait until every machine has reported, and print the conditions.

    Stopped machines whose units are masked are neither started nor awaited. A stopped machine on which another command
    works is not started either, which counts as a failure. A failed step ends the wait. Return the exit code: 1 if a
    step failed or a machine is not ready.
    """
    outcome, failures = _run_pass(reconciler)
    limit = ANSWER_LIMIT + max((each.driver_wait for each in reconciler.config.machines.values()), default=0)
    started, next_report = time.monotonic(), 0.0
    while not failures and (waiting := _waiting(outcome)):
        waited = time.monotonic() - started
        if waited > limit:
            failures += tuple(f"machine {machine.name} did not report within {limit:.0f} s" for machine in waiting)
            break
        if waited >= next_report:
            for machine in waiting:
                progress(f"{machine.name}: waiting: {machine.awaited}")
            next_report = waited + PROGRESS_INTERVAL
        time.sleep(1)
        outcome = reconciler.reconcile()
        ended = {each.name for each in outcome.facts.machines if each.stays_ended}
        failures += outcome.failures
        failures += tuple(started_and_stopped(each.name) for each in _waiting(outcome) if each.name in ended)
    print_machines(outcome.machines, reconciler)
    report_problems(outcome.facts)
    ready = all(machine.ready.status is Status.TRUE for machine in outcome.machines)
    return report_failures(failures) or (0 if ready else 1)


def _run_pass(reconciler: Reconciler) -> tuple[Outcome, tuple[str, ...]]:
    """Make a pass, and start the stopped machines on which no other command works. Return what failed, too.

    The machines' locks are held only until the starts: from then on, other commands may stop the machines again.
    """
    busy: dict[str, str] = {}
    # For all machines together, because `up` may work on all of them.
    until = time.monotonic() + COMMAND_WAIT
    with ExitStack() as locks:
        for name in sorted(reconciler.config.machines):
            try:
                wait = max(until - time.monotonic(), 0.0)
                locks.enter_context(machine_locks(reconciler.system, (name,), "apply", wait))
            except AgentError as error:
                busy[name] = error.message
        outcome = reconciler.run_pass(by_hand=reconciler.config.machines.keys() - busy.keys())
    # A busy machine that has not run since the host booted was started: the service would have started it as well.
    left = (each.name for each in outcome.machines if each.stopped and each.has_run and each.name in busy)
    return outcome, outcome.failures + tuple(f"machine {name} was not started: {busy[name]}" for name in left)


def _waiting(outcome: Outcome) -> list[MachineOutcome]:
    """Return the machines whose reports are awaited.

    A machine that does not run, and whose unit is masked, is not one of them: it can neither start nor report.
    """
    masked = {each.name for each in outcome.facts.machines if each.masked and each.ended}
    return [machine for machine in outcome.machines if machine.pending and machine.name not in masked]
