"""Keeps the last evaluated conditions in /run, so that every command can show when each one last changed."""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import astuple

from agent.host.state.record import Record
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.paths import CONDITIONS
from agent.system.files import System

History = Mapping[str, tuple[Condition, ...]]
"""Conditions by machine."""


class _Condition(Struct, frozen=True):
    """A Condition without `advertised`. Unknown keys are ignored: another release may have written them."""

    type: ConditionType
    status: Status
    reason: str
    message: str
    last_transition: float = 0.0
    losses: tuple[float, ...] = ()
    good_since: float = 0.0


_RECORD = Record(dict[str, tuple[_Condition, ...]])


def read_history(system: System) -> History:
    """Return the history; empty if it is missing or unreadable, because it is only a cache."""
    content = _RECORD.read(CONDITIONS, system) or {}
    return {machine: tuple(Condition(*astuple(each)) for each in conditions) for machine, conditions in content.items()}


def write_history(system: System, history: History) -> tuple[str, ...]:
    """Write the history, world-readable for `status`. Return the failure, one sentence, if there is one."""
    try:
        content = _content(history)
        if _RECORD.read_seen(CONDITIONS, system) != content:
            _RECORD.write(CONDITIONS, content, system)
    except OSError as error:
        return (
            f"cannot write {CONDITIONS}: {error.strerror or error}; commands may then show wrong times of changes: "
            "see `df /run`",
        )
    return ()


def _content(history: History) -> dict[str, tuple[_Condition, ...]]:
    return {machine: tuple(_Condition(*each[:-1]) for each in conditions) for machine, conditions in history.items()}
