"""The host half's verdict on a machine, for the machine's Node object: its Ready condition and the time of evaluation.

A document separate from the handoff and no part of its generation, because it also changes when there is nothing to
set up. Its presence tells the machine half to set the Node condition.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from agent.model.conditions import Condition, ConditionType, Status
from agent.model.errors import DocumentError
from agent.model.json_document import accept_version, get, parse_object
from agent.model.paths import CONDITIONS_NAME
from agent.model.text import one_line

VERSION = 1
SIZE_LIMIT = 1 << 16
"""Bytes; a message has at most agent.model.text.MESSAGE_LIMIT characters of 12 bytes."""
SILENT_AFTER = 300.0
"""Seconds after which a verdict is stale: by then the host half has missed several passes."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of one pass: its Ready condition."""

    status: Status
    reason: str
    message: str
    last_transition: float
    """Seconds since the epoch, as `judged`."""
    judged: float

    @property
    def ready(self) -> Condition:
        return Condition(ConditionType.READY, self.status, self.reason, self.message, self.last_transition)


def judgement(ready: Condition, now: float) -> Judgement:
    return Judgement(ready.status, ready.reason, one_line(ready.message), ready.last_transition, now)


def render_judgement(verdict: Judgement) -> bytes:
    return json.dumps({"version": VERSION, **asdict(verdict)}, indent=1).encode() + b"\n"


def parse_judgement(data: bytes) -> Judgement:
    """Read a verdict. Raises DocumentError, which names the key."""
    where = CONDITIONS_NAME
    document = parse_object(where, data)
    accept_version(where, document, (VERSION,))
    status = get(where, document, "status", str)
    if status not in set(Status):
        raise DocumentError(f"{where}: key status must be True, False or Unknown, not {status[:40]!a}")
    return Judgement(
        Status(status),
        get(where, document, "reason", str),
        get(where, document, "message", str),
        _time(where, document, "last_transition"),
        _time(where, document, "judged"),
    )


def _time(where: str, document: dict[str, Any], key: str) -> float:
    """Return seconds since the epoch that a date can be made of."""
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 36:
        raise DocumentError(f"{where}: key {key} must be a time in seconds, not {str(value)[:40]!a}")
    return float(value)
