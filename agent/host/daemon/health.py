"""What the service shows of its passes: the view for metrics and pages, and sentences for systemd and the log. Pure."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct, field

from agent.host.daemon.wakeups import Tally
from agent.host.reconcile import NO_MACHINES, MachineOutcome, Outcome
from agent.host.verify.gpu_states import Health, health
from agent.model.conditions import Condition, ConditionType, Reason, Status
from agent.model.facts import Facts, Verdict
from agent.model.text import one_line
from agent.system.journal_fields import CONDITION_ID, VERDICT_ID, Fields

NOT_EVALUATED = "not evaluated"
"""Describes a machine before its first pass."""
FAILURE_LIMIT = 300
"""Characters of a failure in the line for `systemctl status`, so that the machines have room too."""

Change: TypeAlias = tuple[int, str, Fields]
"""The log level, a sentence and fields for the journal."""
Check: TypeAlias = tuple[bool, str, str]
"""Whether the check passed, the check's name, and an explanation."""
Fixes = Mapping[str, Mapping[ConditionType, tuple[str, ...]]]
"""Commands, or sentences, that fix the faults that conditions show; by the machine's name."""


class Pass(Struct, frozen=True):
    """One pass that has ended."""

    ended: str
    trigger: str
    seconds: float
    actions: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


class View(Struct):
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


def status_line(machines: Iterable[MachineOutcome], failures: Sequence[str] = ()) -> str:
    """Return one line with the last pass's first failure, if any, and with each machine in a few words.

    The words are those of `unbounded-agent status`.
    """
    words = []
    for machine in machines:
        ready = machine.ready
        state = "unknown" if ready.status is Status.UNKNOWN else "not ready"
        needed = (each for each in machine.conditions if each.needed_for_ready and each.status is ready.status)
        cause = next((f"{each.type} {each.reason}" for each in needed), ready.reason)
        state = "Ready" if ready.status is Status.TRUE else f"{state}: {cause}"
        words.append(f"{machine.name}: {state if machine.conditions else NOT_EVALUATED}")
    line = "; ".join(words) or NO_MACHINES
    return f"the last pass had a failure: {in_brief(failures)}; {line}" if failures else line


def in_brief(failures: Sequence[str]) -> str:
    """Return the first failure, and how many more there are; empty if there is none."""
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return f"{failures[0][:FAILURE_LIMIT]}{more}" if failures else ""


def changes(machine: MachineOutcome, last: MachineOutcome | None) -> Iterator[Change]:
    """Yield a Change for each condition that differs from the `last` one.

    The status or the reason must differ. A condition that was not there counts only if it is not True, or if it is
    Ready. Conditions of one cause have one sentence.
    """
    logged = {each.type: each for each in last.conditions} if last else {}
    changed: dict[tuple[Status, str, str], list[Condition]] = {}
    for each in machine.conditions:
        before = logged.get(each.type)
        new = each.status is not Status.TRUE or each.type is ConditionType.READY
        if new if before is None else before[1:3] != each[1:3]:
            changed.setdefault((each.status, each.reason, each.message), []).append(each)
    for (status, reason, message), same in changed.items():
        level = logging.INFO if status is Status.TRUE else logging.WARNING
        verb = "is" if len(same) == 1 else "are"
        names, gpus = ", ".join(each.type for each in same), dict.fromkeys(gpu for each in same for gpu in each.gpus)
        fields = {"MESSAGE_ID": CONDITION_ID, "MACHINE": machine.name, "CONDITION": names, "REASON": reason}
        fields["GPU"] = " ".join(gpus)
        yield level, one_line(f"{machine.name}: {names} {verb} {status}: {reason}: {message}"), fields


def host_changes(facts: Facts, last: Facts | None) -> Iterator[Change]:
    """Yield the same as `changes` for the host's own checks, and for each GPU with another verdict."""
    before = {each.type: (each.status, each.reason) for each in (last.checks if last else ())}
    for each in facts.checks:
        if (each.status, each.reason) != before.get(each.type, (Status.TRUE, Reason.CHECK_PASSED)):
            level = logging.INFO if each.status is Status.TRUE else logging.WARNING
            fields = {"MESSAGE_ID": CONDITION_ID, "CONDITION": each.type, "REASON": each.reason}
            yield level, one_line(f"host check {each.type} is {each.text}"), fields
    verdicts = _verdicts(last) if last else {}
    for address, found in _verdicts(facts).items():
        known = verdicts.get(address)
        if found.verdict is not (known.verdict if known else Verdict.HEALTHY):
            level = logging.WARNING if found.verdict.fenced else logging.INFO
            sentence = f"GPU {address} {found.verdict.in_words}" + (f": {found.message}" if found.message else "")
            fields = {"MESSAGE_ID": VERDICT_ID, "GPU": address, "VERDICT": found.verdict, "REASON": found.reason}
            yield level, one_line(sentence), fields


def _verdicts(facts: Facts) -> dict[str, Health]:
    return {gpu.pci_address: health(gpu, facts) for vendor in facts.vendors for gpu in vendor.gpus}
