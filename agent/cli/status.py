"""`unbounded-agent status`: prints whether each machine is ready, and why not; can wait until it is, or repeat."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from agent.cli.doctor.host import faults_in_brief
from agent.cli.documents import document
from agent.cli.host import load
from agent.cli.output import print_machines, print_tables, report_problems, style
from agent.cli.printing import report, say
from agent.cli.summary import causes, summaries
from agent.cli.wiring import reconciler_for
from agent.config.settings import Config
from agent.host.outcome import NO_MACHINES, MachineOutcome
from agent.host.reconcile import Reconciler
from agent.host.state.condition_history import read_history
from agent.model.conditions import Status
from agent.model.errors import AgentError, ConfigError
from agent.model.facts import Facts
from agent.model.reasons import Reason
from agent.model.text import rfc3339
from agent.system.files import System

NOT_READY, UNKNOWN = 3, 4
"""Exit codes of --check and --wait. 1 and 2 mean that the command failed."""
AS_ROOT = "note: root may read what is unknown here: run `sudo unbounded-agent status`"
POLL = 1.0
"""Seconds between two observations while waiting."""
CLEAR = "\x1b[H\x1b[2J"
"""Clears a terminal (ECMA-48)."""


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
    if request.wait is not None:
        facts, machines = _wait(reconciler, request, request.wait)
    else:
        facts, machines = _observe(reconciler, request)
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


def _wait(reconciler: Reconciler, request: Request, seconds: float) -> tuple[Facts, tuple[MachineOutcome, ...]]:
    """Wait until all machines are ready, or time is up."""
    deadline, last_sentence = time.monotonic() + seconds, ""
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
