"""Keeps the last evaluated conditions in /run, so that every command can show when each one last changed."""

from collections.abc import Mapping

from agent.host.state.record import Record
from agent.model.conditions import Condition
from agent.model.paths import CONDITIONS
from agent.system.files import System

History = Mapping[str, tuple[Condition, ...]]
"""Conditions by machine."""
_RECORD: Record[History] = Record(dict[str, tuple[Condition, ...]])


def read_history(system: System) -> History:
    """Return the history; empty if it is missing or unreadable, because it is only a cache."""
    return _RECORD.read(CONDITIONS, system) or {}


def write_history(system: System, history: History) -> tuple[str, ...]:
    """Write the history, world-readable for `status`. Return the failure, one sentence, if there is one."""
    try:
        if _RECORD.read_seen(CONDITIONS, system) != history:
            _RECORD.write(CONDITIONS, history, system)
    except OSError as error:
        return (
            f"cannot write {CONDITIONS}: {error.strerror or error}; commands may then show wrong times of changes: "
            "see `df /run`",
        )
    return ()
