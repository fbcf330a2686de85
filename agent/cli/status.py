"""`unbounded-agent status` and `apply`: show what is, and make a pass."""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from msgspec.structs import astuple, replace

from agent.cli.doctor.host import faults_in_brief
from agent.cli.host import load, settings_of
from agent.cli.output import (
    causes,
    check_lines,
    condition_tables,
    document,
    print_machines,
    print_no_machines,
    report_problems,
    summaries,
)
from agent.cli.printing import report, report_failures, say, terminal
from agent.host.reconcile import NO_MACHINES, MachineOutcome, Outcome, Reconciler, started_and_stopped
from agent.host.state.locks import COMMAND_WAIT, machine_locks
from agent.host.state.records import read_history
from agent.model.conditions import Reason, Status, kubernetes_form
from agent.model.errors import AgentError, ConfigError
from agent.model.facts import Facts
from agent.model.text import rfc3339
from agent.system.files import System

EXIT_CODES = {Status.FALSE: 3, Status.UNKNOWN: 4}
"""Exit codes of --check and --wait, the worst first. 1 and 2 mean that the command failed."""
AS_ROOT = "note: root may read what is unknown here: run `sudo unbounded-agent status`"
CLEAR = "\x1b[H\x1b[2J"
"""Clears a terminal (ECMA-48)."""
ANSWER_LIMIT = 180.0
"""Seconds that `apply` waits for machines to boot and report, in addition to their longest driver_wait."""


def status(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print the machines' states. Return the exit code. Raises ConfigError for an unknown machine."""
    if options.machine:
        settings_of(options.machine, reconciler.config)
    if options.watch is not None:
        return _watch(options, reconciler)

    def look() -> tuple[tuple[Facts, tuple[MachineOutcome, ...]], str]:
        facts, machines = _observe(options.machine, reconciler)
        waiting = (each for each in machines if each.ready.status is not Status.TRUE and not each.candidate_of)
        return (facts, machines), "; ".join(f"{each.name}: waiting: {each.ready.reason}" for each in waiting)

    facts, machines = reconciler.wait(look, options.wait or 0.0)
    report_problems(facts)
    for sentence in faults_in_brief(facts, reconciler.config, reconciler.system):
        report(f"note: {sentence}")
    _print(options, reconciler, facts, machines)
    if os.geteuid() != 0 and any(c.reason == Reason.OBSERVATION_FAILED for each in machines for c in each.conditions):
        report(AS_ROOT)
    if not options.check and options.wait is None:
        return 0
    statuses = {each.ready.status for each in machines if not each.candidate_of}
    return next((code for each, code in EXIT_CODES.items() if each in statuses), 0)


def _print(
    options: argparse.Namespace, reconciler: Reconciler, facts: Facts, machines: tuple[MachineOutcome, ...]
) -> None:
    if options.json:
        say([document("status", as_object(machines, facts))])
    elif options.wide:
        say(condition_tables(machines))
        print_no_machines(reconciler)
    elif len(machines) > 1:
        width, colour = terminal()
        say(summaries(machines, width=width, colour=colour, whole=False))
        if any(causes(each.conditions) for each in machines):
            say(["", "Full messages: unbounded-agent status MACHINE", "What to do: unbounded-agent doctor"])
    else:
        print_machines(machines, reconciler)
    if not options.json:
        say(check_lines(facts, terminal()[0], every=options.wide))


def _observe(machine: str, reconciler: Reconciler) -> tuple[Facts, tuple[MachineOutcome, ...]]:
    """Return the facts, and this machine, or all machines if the name is empty."""
    facts, planned, left = reconciler.preview()
    machines = reconciler.evaluate(facts, planned, left)
    return facts, as_dated((each for each in machines if machine in ("", each.name)), reconciler.system)


def as_dated(machines: Iterable[MachineOutcome], system: System) -> tuple[MachineOutcome, ...]:
    """Return the machines. For each condition, keep the time of its last change only if a pass has recorded the change.

    Any other change was noticed just now, but if the service does not run, the change may be days old. So its time is
    unknown, and set to 0.
    """
    history = read_history(system)
    known = {(name, each.type, each.status) for name, recorded in history.items() for each in recorded}
    return tuple(
        replace(
            machine,
            conditions=tuple(
                each if (machine.name, each.type, each.status) in known else each._replace(last_transition=0.0)
                for each in machine.conditions
            ),
        )
        for machine in machines
    )


def _watch(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print again and again until interrupted. On a terminal, clear it before each print.

    If standard output is not a terminal, print only after a change. While the configuration is invalid, show why, and
    the machines of the last valid one.
    """
    before: Sequence[object] = ()
    while True:
        now = rfc3339(time.time())
        current: Sequence[object]
        rejected: list[str] = []
        try:
            reconciler.config = load(options, reconciler.system).config
        except (ConfigError, ImportError) as error:
            # ImportError: the agent is being upgraded.
            rejected = [str(error)]
        try:
            _, machines = _observe(options.machine, reconciler)
            current = [*rejected, *((each.name, *causes(each.conditions)) for each in machines)]
            none = f"machine {options.machine} is not configured" if options.machine else NO_MACHINES
            width, colour = terminal()
            shown = summaries(machines, width=width, colour=colour, whole=len(machines) == 1)
            lines = [*rejected, *(shown if machines else [none])]
        except AgentError as error:
            current = lines = [str(error)]
        if sys.stdout.isatty():
            say([f"{CLEAR}{now}", *lines])
        elif current != before:
            say([now, *lines])
        before = current
        time.sleep(options.watch)


def as_object(machines: Iterable[MachineOutcome], facts: Facts) -> dict[str, object]:
    """Return the content of `status --json` (docs/json.md)."""
    states = {
        machine.name: {
            "ready": machine.ready.status,
            "reason": machine.ready.reason,
            "message": machine.ready.message,
            "gpus": machine.gpus,
            "lostGPUs": machine.lost,
            **({"candidateFor": machine.candidate_of} if machine.candidate_of else {}),
            "conditions": [each.to_kubernetes() for each in machine.conditions],
        }
        for machine in machines
    }
    checks = [kubernetes_form(*astuple(each)) for each in facts.checks]
    return {"machines": states, "checks": checks, "problems": facts.all_problems()}


def apply(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Make a pass, start stopped machines, wait until every machine has reported, and print the conditions.

    Stopped machines whose units are masked are neither started nor awaited. A stopped machine on which another command
    works is not started either, which counts as a failure. A failed step ends the wait. Return the exit code: 1 if a
    step failed or a machine is not ready.
    """
    first = [_run_pass(reconciler)]

    def look() -> tuple[tuple[Outcome, tuple[str, ...], list[MachineOutcome]], str]:
        if first:
            outcome, failures = first.pop()
        else:
            outcome = reconciler.reconcile()
            ended = {each.name for each in outcome.facts.machines if each.stays_ended}
            stopped = (started_and_stopped(each.name) for each in _waiting(outcome) if each.name in ended)
            failures = (*outcome.failures, *stopped)
        waiting = [] if failures else _waiting(outcome)
        return (outcome, failures, waiting), "; ".join(f"{each.name}: waiting: {each.awaited}" for each in waiting)

    limit = ANSWER_LIMIT + max((each.driver_wait for each in reconciler.config.machines.values()), default=0)
    outcome, failures, waiting = reconciler.wait(look, limit)
    failures += tuple(f"machine {machine.name} did not report within {limit:.0f} s" for machine in waiting)
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
