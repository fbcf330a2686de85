"""The host status: a machine's Ready condition as the host half evaluated it, for the machine's Node object.

It is not part of the handoff, because a change of Ready gives the machine half nothing to set up, and so must not start
a new generation. The machine half sets the Node condition if this document exists.
"""

import json
from typing import NamedTuple

from agent.model.conditions import Condition, ConditionType, Status
from agent.model.errors import DocumentError
from agent.model.json_document import accept_version, get, parse_object, timestamp
from agent.model.paths import CONDITIONS_NAME
from agent.model.text import one_line

VERSION = 1
SIZE_LIMIT = 1 << 16
"""Bytes of the largest document. A message has up to agent.model.text.MESSAGE_LIMIT characters of up to 12 bytes."""
SILENT_AFTER = 300.0
"""Age in seconds at which a host status is stale, because the host half has missed several passes by then."""


class HostStatus(NamedTuple):
    """A machine's Ready condition after one pass."""

    status: Status
    reason: str
    message: str
    last_transition: float
    """When `status` last changed, in seconds since the epoch."""
    evaluated: float
    """When the condition was evaluated, in seconds since the epoch. The document's key is `judged`."""

    @property
    def ready(self) -> Condition:
        return Condition(ConditionType.READY, self.status, self.reason, self.message, self.last_transition)


def host_status(ready: Condition, now: float) -> HostStatus:
    """Return the host status with this Ready condition, evaluated at `now`."""
    return HostStatus(ready.status, ready.reason, one_line(ready.message), ready.last_transition, now)


def render_host_status(status: HostStatus) -> bytes:
    """Return the document."""
    document = {"version": VERSION, **status._asdict()}
    document["judged"] = document.pop("evaluated")
    return json.dumps(document, indent=1).encode() + b"\n"


def parse_host_status(data: bytes) -> HostStatus:
    """Return the host status in a document. Raises DocumentError, which names the key."""
    where = CONDITIONS_NAME
    document = parse_object(where, data)
    accept_version(where, document, (VERSION,))
    status = get(where, document, "status", str)
    if status not in set(Status):
        raise DocumentError(f"{where}: key status must be True, False or Unknown, not {status[:40]!a}")
    return HostStatus(
        Status(status),
        get(where, document, "reason", str),
        get(where, document, "message", str),
        timestamp(where, document, "last_transition"),
        timestamp(where, document, "judged"),
    )
