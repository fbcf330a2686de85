"""Describes the result of a pass for probes, `systemctl status` and the log. Pure."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import TypeAlias

from msgspec import Struct, field

from agent.host.daemon.server import VERBOSE, Page
from agent.host.daemon.wakeups import Tally
from agent.host.reconcile import NO_MACHINES, MachineOutcome, Outcome
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.text import one_line

NOT_EVALUATED = "not evaluated"
"""Describes a machine before its first pass."""
FAILURE_LIMIT = 300
"""Characters of a failure in the line for `systemctl status`, so that the machines have room too."""


def status_line(machines: Iterable[MachineOutcome], failures: Sequence[str] = ()) -> str:
    """Return one line with the last pass's first failure, if any, and with each machine in a few words."""
    line = "; ".join(f"{machine.name}: {_in_words(machine)}" for machine in machines) or NO_MACHINES
    return f"the last pass had a failure: {in_brief(failures)}; {line}" if failures else line


def in_brief(failures: Sequence[str]) -> str:
    """Return the first failure, and how many more there are; empty if there is none."""
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return f"{failures[0][:FAILURE_LIMIT]}{more}" if failures else ""


def _in_words(machine: MachineOutcome) -> str:
    if not machine.conditions:
        return NOT_EVALUATED
    ready = machine.ready
    if ready.status is Status.TRUE:
        return "Ready"
    # Use the same words as `unbounded-agent status`.
    state = "unknown" if ready.status is Status.UNKNOWN else "not ready"
    for each in machine.conditions:
        if each.needed_for_ready and each.status is ready.status:
            return f"{state}: {each.type} {each.reason}"
    return f"{state}: {ready.reason}"


def changes(machine: MachineOutcome, logged: Mapping[ConditionType, Condition]) -> Iterator[tuple[int, str]]:
    """Yield the log level and a sentence for each condition whose status or reason differs from `logged`.

    A condition that is not in `logged` counts only if it is not True, or if it is Ready. Conditions of one cause have
    one sentence.
    """
    changed: dict[tuple[Status, str, str], list[ConditionType]] = {}
    for each in machine.conditions:
        before = logged.get(each.type)
        if before is None:
            new = each.status is not Status.TRUE or each.type is ConditionType.READY
        else:
            new = (before.status, before.reason) != (each.status, each.reason)
        if new:
            changed.setdefault((each.status, each.reason, each.message), []).append(each.type)
    for (status, reason, message), kinds in changed.items():
        level = logging.INFO if status is Status.TRUE else logging.WARNING
        verb = "is" if len(kinds) == 1 else "are"
        yield level, one_line(f"{machine.name}: {', '.join(kinds)} {verb} {status}: {reason}: {message}")


Check: TypeAlias = tuple[bool, str, str]
"""Whether the check passed, the check's name, and an explanation."""


def machine_checks(machine: MachineOutcome) -> list[Check]:
    """Return the checks of a machine. Only the first one, Ready, decides the page's status; the others explain it."""
    if not machine.conditions:
        return [(False, ConditionType.READY, NOT_EVALUATED)]
    others = (each for each in machine.conditions if each.type is not ConditionType.READY)
    return [
        (each.status is Status.TRUE, each.type, f"{each.status} {each.reason}: {each.message}")
        for each in (machine.ready, *others)
    ]


def check_pages(path: str, checks: Sequence[Check]) -> dict[str, Page]:
    """Return the short and the verbose page of a path. The first check decides their status.

    If that check fails, both are verbose, so that the short page explains the failure, as in Kubernetes.
    """
    good = checks[0][0]
    lines = [f"[{'+' if passed else '-'}]{one_line(f'{name} {text}')}" for passed, name, text in checks]
    lines.append(f"{path[1:]} check {'passed' if good else 'failed'}")
    status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
    verbose = Page(status, "".join(f"{line}\n" for line in lines).encode())
    return {path: Page(HTTPStatus.OK, b"ok\n") if good else verbose, path + VERBOSE: verbose}


PASSES = 20
"""How many passes are remembered: enough for all passes after one event, and some earlier ones."""


Fixes = Mapping[str, Mapping[ConditionType, tuple[str, ...]]]
"""Commands, or sentences, that fix the faults that conditions show; by the machine's name."""


class Pass(Struct, frozen=True):
    """One pass that has ended."""

    ended: str
    trigger: str
    seconds: float
    actions: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


class View(Struct, frozen=True):
    """The values that pages and metrics show. Times are in seconds since the epoch."""

    version: str
    machines: tuple[MachineOutcome, ...]
    """Every configured machine. One that no pass has evaluated yet has no conditions."""
    outcome: Outcome | None = None
    """The last outcome, even an old one; None before the first. Pages that must not show an old outcome get a view with
    None instead."""
    why_stale: str = ""
    """Why there is no fresh observation; empty if there is one."""
    written: float = 0.0
    """When the view was made."""
    observed: float = 0.0
    """When a pass last observed the devices of all vendors; 0 if none has."""
    config_good: bool = True
    config_loaded: float = 0.0
    """When the configuration in force was read."""
    passes: Sequence[Pass] = ()
    wakeups: tuple[Tally, ...] = ()
    notes: tuple[Check, ...] = ()
    """Further checks for /readyz?verbose that do not affect its status."""
    discarded: Mapping[str, int] = field(default_factory=dict)
    """How often the agent discarded a file of its own state, by file name."""
    fixes: Fixes = field(default_factory=dict)
    stuck: tuple[str, ...] = ()
    """The reads and commands that missed their deadline and still hang."""
