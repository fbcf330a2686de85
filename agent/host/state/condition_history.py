"""The last evaluated conditions, kept in /run so that every command shows when each one last changed."""

import json
from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from agent.model.conditions import Condition
from agent.model.facts import Broken
from agent.model.paths import CONDITIONS
from agent.system.damage import discard, write_record
from agent.system.files import System
from agent.system.seen import look

_ADAPTER: TypeAdapter[dict[str, tuple[Condition, ...]]] = TypeAdapter(dict[str, tuple[Condition, ...]])

History = Mapping[str, tuple[Condition, ...]]
"""Conditions by machine."""


def read_history(system: System) -> History:
    """Return the history; empty if it is missing or unreadable, since it is only a cache."""
    match look(system.read, CONDITIONS):
        case bytes() as data:
            try:
                return _ADAPTER.validate_json(data)
            except ValidationError as error:
                discard(CONDITIONS, f"{error.error_count()} errors")
        case Broken(why):
            discard(CONDITIONS, why)
        case _:
            pass
    return {}


def write_history(system: System, history: History) -> tuple[str, ...]:
    """Write the history, world-readable for `status`. Return failures, one sentence each: the file is only a cache."""
    content = _ADAPTER.dump_json(dict(history), indent=1) + b"\n"
    try:
        unchanged = system.read(CONDITIONS) == content
    except OSError:
        unchanged = False
    try:
        if not unchanged:
            write_record(system, CONDITIONS, content)
    except OSError as error:
        return (f"cannot write {CONDITIONS}: {error.strerror or error}",)
    return ()


def as_json(history: History) -> str:
    """Return JSON for `status --json`: a list per machine, each item in the form of a Kubernetes condition."""
    document = {machine: [each.to_kubernetes() for each in conditions] for machine, conditions in history.items()}
    return json.dumps(document, indent=2)
