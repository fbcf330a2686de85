"""The host status: a machine's Ready condition as the host half evaluated it, for the machine's Node object.

It is not part of the handoff, because a change of Ready gives the machine half nothing to set up, and so must not start
a new generation. The machine half sets the Node condition if this document exists.
"""

from typing import NamedTuple

from agent.model.conditions import Condition, ConditionType, Status
from agent.model.json_document import HOST, Seconds, parse_document, render_document
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
    last_transition: Seconds
    """When `status` last changed."""
    evaluated: Seconds
    """When the condition was evaluated."""

    @property
    def ready(self) -> Condition:
        return Condition(ConditionType.READY, self.status, self.reason, self.message, self.last_transition)


def host_status(ready: Condition, now: float) -> HostStatus:
    """Return the host status with this Ready condition, evaluated at `now`."""
    return HostStatus(ready.status, ready.reason, one_line(ready.message), ready.last_transition, now)


def render_host_status(status: HostStatus) -> bytes:
    """Return the document."""
    return render_document(VERSION, status)


def parse_host_status(data: bytes) -> HostStatus:
    """Return the host status in a document. Raises DocumentError, which names the key."""
    return parse_document(CONDITIONS_NAME, data, HostStatus, VERSION, HOST)
