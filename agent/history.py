"""The last evaluated conditions, kept in /run so that every command shows when each one last changed."""

import json
from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from agent.conditions import Condition
from agent.judgement import rfc3339
from agent.paths import CONDITIONS
from agent.system.files import System

_ADAPTER: TypeAdapter[dict[str, tuple[Condition, ...]]] = TypeAdapter(dict[str, tuple[Condition, ...]])

History = Mapping[str, tuple[Condition, ...]]
"""Conditions by machine."""


def read_history(system: System) -> History:
    """Empty when there is none, or none that can be read: it is only a cache."""
    try:
        return _ADAPTER.validate_json(system.read(CONDITIONS))
    except (OSError, ValidationError):
        return {}


def write_history(system: System, history: History) -> None:
    """World-readable: `status` works as any user."""
    content = _ADAPTER.dump_json(dict(history), indent=1) + b"\n"
    try:
        unchanged = system.read(CONDITIONS) == content
    except OSError:
        unchanged = False
    if not unchanged:
        system.write(CONDITIONS, content)


def as_json(history: History) -> str:
    """For `status --json`: a list per machine, each item in the form of Kubernetes' conditions."""
    document = {
        machine: [
            {
                "type": each.type,
                "status": each.status,
                "reason": each.reason,
                "message": each.message,
                "lastTransitionTime": rfc3339(each.last_transition),
            }
            for each in conditions
        ]
        for machine, conditions in history.items()
    }
    return json.dumps(document, indent=2)
