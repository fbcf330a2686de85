"""`unbounded-agent status`, `plan` and `apply`: show what is, show what would be done, and do it."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from agent.cli.doctor.host import faults_in_brief
from agent.cli.host import load
from agent.cli.output import (
    causes,
    document,
    print_machines,
    print_no_machines,
    print_tables,
    report_problems,
    started_and_stopped,
    style,
    summaries,
)
from agent.cli.output import difference as file_difference
from agent.cli.printing import progress, report, report_failures, say
from agent.cli.wiring import reconciler_for
from agent.config.settings import Config
from agent.host.plan.diff import Difference
from agent.host.plan.goal import Plan
from agent.host.reconcile import NO_MACHINES, MachineOutcome, Outcome, Reconciler
from agent.host.state.locks import COMMAND_WAIT, machine_locks
from agent.host.state.records import read_history
from agent.model.conditions import Reason, Status
from agent.model.errors import AgentError, ConfigError
from agent.model.facts import Absent, Broken, Facts, Unseen
from agent.model.goal import Action, Step
from agent.model.text import rfc3339
from agent.system.files import System

NOT_READY, UNKNOWN = 3, 4
"""Exit codes of --check and --wait. 1 and 2 mean that the command failed."""
AS_ROOT = "note: root may read what is unknown here: run `sudo unbounded-agent status`"
POLL = 1.0
"""Seconds between two observations while waiting."""
CLEAR = "\x1b[H\x1b[2J"
"""Clears a terminal (ECMA-48)."""


JsonStep: TypeAlias = dict[str, str]
"""A step in the document of `plan`."""


class Request(Struct, frozen=True):
    """What to print, and whether to wait or repeat."""

    machine: str = ""
    """The only machine to print; empty for all."""
    form: str = ""
    """`json`, `wide`, or empty for a summary."""
    check: bool = False
    """Whether the exit code says if the machines are ready."""
    wait: float | None = None
    """Seconds to wait until the machines are ready; None to print at once."""
    watch: float | None = None
    """Seconds between two prints; None to print once."""


def run_status(options: argparse.Namespace) -> int:
    """Run `status` with these options."""
    form = "json" if options.json else "wide" if options.wide else ""
    request = Request(options.machine, form, options.check, options.wait, options.watch)
    reconciler = reconciler_for(options)
    return status(reconciler, request, lambda: load(options, reconciler.system).config)


def status(reconciler: Reconciler, request: Request = Request(), load_again: Callable[[], Config] | None = None) -> int:
    """Print the machines' states as `request` asks. Return the exit code. Raises ConfigError for an unknown machine.

    `load_again` reads the configuration again; None if the configuration cannot change.
    """
    if request.machine and request.machine not in reconciler.config.machines:
        known = ", ".join(reconciler.config.machines) or "none"
        raise ConfigError(f"machine {request.machine} is not configured", f"configured machines: {known}")
    if request.watch is not None:
        return _watch(reconciler, request, request.watch, load_again or (lambda: reconciler.config))
    facts, machines = _observe(reconciler, request) if request.wait is None else _wait(reconciler, request)
    report_problems(facts)
    for sentence in faults_in_brief(reconciler.config, reconciler.system):
        report(f"note: {sentence}")
    _print(reconciler, request, facts, machines)
    if os.geteuid() != 0 and any(c.reason == Reason.OBSERVATION_FAILED for each in machines for c in each.conditions):
        report(AS_ROOT)
    return _exit_code(machines) if request.check or request.wait is not None else 0


def _observe(reconciler: Reconciler, request: Request) -> tuple[Facts, tuple[MachineOutcome, ...]]:
    facts, planned, difference = reconciler.preview()
    machines = reconciler.evaluate(facts, planned, difference)
    requested = (each for each in machines if request.machine in ("", each.name))
    return facts, as_dated(requested, reconciler.system)


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


def _print(reconciler: Reconciler, request: Request, facts: Facts, machines: tuple[MachineOutcome, ...]) -> None:
    match request.form:
        case "json":
            say([as_json(machines, facts, time.time())])
        case "wide":
            print_tables(machines, reconciler)
        case _ if len(machines) > 1:
            say(summaries(machines, time.time(), style(whole=False)))
            if any(causes(each.conditions) for each in machines):
                say(["", "Full messages: unbounded-agent status MACHINE", "What to do: unbounded-agent doctor"])
        case _:
            print_machines(machines, reconciler)


def _wait(reconciler: Reconciler, request: Request) -> tuple[Facts, tuple[MachineOutcome, ...]]:
    """Wait until all machines are ready, or time is up."""
    deadline, last_sentence = time.monotonic() + (request.wait or 0), ""
    while True:
        facts, machines = _observe(reconciler, request)
        waiting = [each for each in machines if each.ready.status is not Status.TRUE]
        if not waiting or time.monotonic() >= deadline:
            return facts, machines
        sentence = "; ".join(f"{each.name}: waiting: {each.ready.reason}" for each in waiting)
        if sentence != last_sentence:
            reconciler.progress(sentence)
            last_sentence = sentence
        time.sleep(POLL)


def _watch(reconciler: Reconciler, request: Request, interval: float, load_again: Callable[[], Config]) -> int:
    """Print again and again until interrupted. On a terminal, clear it before each print.

    If standard output is not a terminal, print only after a change. While the configuration is invalid, show why, and
    the machines of the last valid one.
    """
    before: Sequence[object] = ()
    while True:
        now = time.time()
        current: Sequence[object]
        rejected: list[str] = []
        try:
            reconciler.config = load_again()
        except (ConfigError, ImportError) as error:
            # ImportError: the agent is being upgraded.
            rejected = [str(error)]
        try:
            _, machines = _observe(reconciler, request)
            current = [*rejected, *((each.name, *causes(each.conditions)) for each in machines)]
            none = f"machine {request.machine} is not configured" if request.machine else NO_MACHINES
            lines = [*rejected, *(summaries(machines, now, style(whole=len(machines) == 1)) if machines else [none])]
        except AgentError as error:
            current = lines = [str(error)]
        if sys.stdout.isatty():
            say([f"{CLEAR}{rfc3339(now)}", *lines])
        elif current != before:
            say([rfc3339(now), *lines])
        before = current
        time.sleep(interval)


def _exit_code(machines: Iterable[MachineOutcome]) -> int:
    statuses = {each.ready.status for each in machines}
    return NOT_READY if Status.FALSE in statuses else UNKNOWN if Status.UNKNOWN in statuses else 0


def as_json(machines: Iterable[MachineOutcome], facts: Facts, now: float) -> str:
    """Return the document of `status --json` (docs/json.md)."""
    states = {
        machine.name: {
            "ready": machine.ready.status,
            "reason": machine.ready.reason,
            "message": machine.ready.message,
            "gpus": machine.gpus,
            "lostGPUs": machine.lost,
            "conditions": [each.to_kubernetes() for each in machine.conditions],
        }
        for machine in machines
    }
    return document("status", now, {"machines": states, "problems": facts.all_problems()})


def run_plan(options: argparse.Namespace) -> int:
    """Run `plan` with these options."""
    return plan(reconciler_for(options), with_differences=options.diff, for_programs=options.json)


def plan(reconciler: Reconciler, *, with_differences: bool = False, for_programs: bool = False) -> int:
    """Print the steps. Also print each machine that does not get its settings, or perhaps does not, with the reason.

    Return 1 if a machine's files must not be written, or if systemd-nspawn@.service is missing or cannot be read; 2 if
    a machine does not exist and `up` does not make it: its name may be wrong.
    """
    facts, planned, difference = reconciler.preview()
    stopped = [each.name for each in reconciler.evaluate(facts, planned, difference) if each.stopped]
    of_up, unknown = _of_up(reconciler, facts, difference)
    exceptions = (*_exceptions(planned, difference, facts), *unknown.items())
    if for_programs:
        steps = [*_as_json(difference.actions), *map(_start, stopped)]
        others = [{"machine": name, "message": why} for name, why in exceptions]
        content = {"steps": steps, "upSteps": of_up, "exceptions": others, "problems": facts.all_problems()}
        say([document("plan", time.time(), content)])
    else:
        say(f"{name}: {why}" for name, why in exceptions)
        if (
            difference.actions
            or stopped
            or not (of_up or any(isinstance(each.root, Absent) for each in facts.machines))
        ):
            say(_steps(difference.actions, stopped, reconciler, with_differences=with_differences))
        say(f"`up` would {each['sentence']}" for each in of_up)
        print_no_machines(reconciler)
        report_problems(facts)
    return _plan_code(reconciler.config, difference, facts)


def _plan_code(config: Config, difference: Difference, facts: Facts) -> int:
    configured = [each for each in facts.machines if each.name in config.machines]
    broken = any(isinstance(each.root, Broken) for each in configured)
    if broken or difference.refused or not isinstance(facts.template_device_allow, tuple):
        return 1
    missing = (each.name for each in configured if isinstance(each.root, Absent))
    return 0 if all(config.machines[name].node for name in missing) else 2


def _steps(
    actions: tuple[Action, ...], stopped: list[str], reconciler: Reconciler, *, with_differences: bool
) -> Iterator[str]:
    if not actions and not stopped:
        yield "nothing to do"
    for action in actions:
        yield f"would {action.describe()}"
        if with_differences:
            yield from file_difference(action, reconciler.system)
    for name in stopped:
        yield f"would start machine {name}"


def _of_up(reconciler: Reconciler, facts: Facts, difference: Difference) -> tuple[list[JsonStep], dict[str, str]]:
    """Return the steps of `up` that `apply` would not carry out, and by machine why some are unknown."""
    nodes = tuple(sorted(name for name, each in reconciler.config.machines.items() if each.node))
    if not nodes:
        return [], {}
    # Here, because only hosts with nodes need them, and they take 40 ms.
    from agent.host.provision.up import Provisioner, as_if_made
    from agent.system.network import HostNetwork

    _, planned, with_machines = reconciler.planned(as_if_made(nodes, facts))
    before, after, unknown = Provisioner(reconciler.config, reconciler.system, HostNetwork()).preview(nodes, planned)
    settings = [each for each in with_machines.actions if each not in difference.actions]
    made = [each.name for each in facts.machines if each.name in nodes and isinstance(each.root, Absent)]
    steps = [*_as_json((*before, *settings)), *map(_start, made), *_as_json(after)]
    return steps, {name: f"what `up` would do is not completely known: {why}" for name, why in unknown.items()}


def _as_json(steps: Iterable[Step]) -> list[JsonStep]:
    return [{"kind": each.kind, "sentence": each.describe()} for each in steps]


def _start(machine: str) -> JsonStep:
    return {"kind": "start", "sentence": f"start machine {machine}"}


def _exceptions(planned: Plan, difference: Difference, facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield each machine that does not get its settings, or perhaps does not, with the reason."""
    for machine in facts.machines:
        if isinstance(machine.root, Unseen):
            yield machine.name, f"whether it exists is unknown; this is the plan if it does: {machine.root.why}"
    for name, why in planned.skipped.items():
        yield name, f"{why}: nothing is set up"
    for name, why in planned.held.items():
        yield name, f"left unchanged: {why}"
    for name, refused in difference.refused.items():
        yield name, f"its settings are not written: {refused.why if isinstance(refused, Unseen) else refused}"


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
