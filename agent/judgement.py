"""The host half's verdict on a machine, for the machine's own Node object: its Ready condition, and when it was judged.

A second document beside the handoff, and no part of its generation: it changes when nothing is to be set up anew. That
it is there at all tells the machine half that it is wanted.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from agent.conditions import Condition, ConditionType, Status
from agent.documents import accept_version, get, parse_object
from agent.errors import DocumentError
from agent.handoff import one_line
from agent.paths import CONDITIONS_NAME

VERSION = 1
SIZE_LIMIT = 1 << 16
"""Bytes; a message has at most agent.handoff.MESSAGE_LIMIT characters of 12 bytes."""
SILENT_AFTER = 300.0
"""Seconds after which a verdict says nothing any more: several passes of the host half are missing by then."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of one pass: what its Ready condition says."""

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
    """Raises DocumentError, which names the key."""
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


def rfc3339(seconds: float) -> str:
    """A time as Kubernetes writes it: UTC, whole seconds."""
    # Here: importing it takes a tenth of the machine half's start, which reads judgements and dates none.
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _time(where: str, document: dict[str, Any], key: str) -> float:
    """Seconds since the epoch that a date can be made of."""
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 36:
        raise DocumentError(f"{where}: key {key} must be a time in seconds, not {str(value)[:40]!a}")
    return float(value)
