"""Keeps the last evaluated conditions in /run, so that every command can show when each one last changed.

All times are by the wall clock. If the clock was set after the times were written, they are corrected when they are
read. Without this correction, on a host whose clock has no battery and is set after boot, conditions would look years
old, and a start that has just begun would look overdue.
"""

import time
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import astuple

from agent.host.state.record import Record
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.facts import Seen
from agent.model.paths import CONDITIONS
from agent.system.ages import STEP
from agent.system.files import System

History = Mapping[str, tuple[Condition, ...]]
"""Conditions by machine."""


Time = Annotated[float, Meta(gt=-(2**36), lt=2**36)]
"""Seconds since the epoch. Numbers beyond these limits, as in a damaged file, could not be shown as a date."""


class _Condition(Struct, frozen=True):
    """A Condition up to `good_since`, with `gpus` and `said`."""

    type: ConditionType
    status: Status
    reason: str
    message: str
    last_transition: Time
    losses: tuple[Time, ...]
    good_since: Time
    booted: Time
    """When the host booted, by the wall clock as it was set when the times above were written."""
    gpus: tuple[str, ...]
    said: tuple[tuple[str, str, str], ...] | None


_RECORD = Record(dict[str, tuple[_Condition, ...]])


def read_history(system: System) -> History:
    """Return the history; empty if it is missing or unreadable, because it is only a cache."""
    content, booted = _RECORD.read(CONDITIONS, system) or {}, _booted()
    return {machine: tuple(_read(each, booted) for each in conditions) for machine, conditions in content.items()}


def write_history(system: System, history: History) -> tuple[str, ...]:
    """Write the history, world-readable for `status`. Return the failure, one sentence, if there is one."""
    try:
        before = _RECORD.read_seen(CONDITIONS, system)
        content = _content(history, _recorded(before, _booted()))
        if before != content:
            _RECORD.write(CONDITIONS, content, system)
    except OSError as error:
        return (
            f"cannot write {CONDITIONS}: {error.strerror or error}; commands may then show wrong times of changes: "
            "see `df /run`",
        )
    return ()


def _booted() -> float:
    """Return when the host booted, by the wall clock. The result changes only if somebody sets the clock."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _recorded(before: Seen[dict[str, tuple[_Condition, ...]]], booted: float) -> float:
    """Return the recorded time of the boot; `booted` if there is none, or if the clock was set since.

    `booted` is a little different in each pass. With the recorded time instead, the file does not change as long as the
    history does not change.
    """
    known = [each.booted for conditions in before.values() for each in conditions] if isinstance(before, dict) else []
    return next((each for each in known if abs(each - booted) < STEP), booted)


def _read(found: _Condition, booted: float) -> Condition:
    """Return the condition. If the clock was set since its times were written, correct them."""
    *condition, recorded, gpus, said = astuple(found)
    read = Condition(*condition)._replace(gpus=gpus, said=said)
    set_by = booted - recorded
    if abs(set_by) < STEP:
        return read
    return read._replace(
        last_transition=read.last_transition and read.last_transition + set_by,
        losses=tuple(at + set_by for at in read.losses),
        good_since=read.good_since and read.good_since + set_by,
    )


def _content(history: History, booted: float) -> dict[str, tuple[_Condition, ...]]:
    return {
        machine: tuple(_Condition(*each[:7], booted=booted, gpus=each.gpus, said=each.said) for each in conditions)
        for machine, conditions in history.items()
    }
