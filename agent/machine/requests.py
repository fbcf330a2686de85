"""Serves what the host asks for in a document of the handoff directory, one request after the other.

The command on the host keeps the document locked (flock(2)) as long as it waits. If the command is killed, it cannot
remove the document, but the kernel ends its lock. The machine sees that, because it has the same file system.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from agent.model.errors import AgentError
from agent.model.handoff import SIZE_LIMIT
from agent.system.files import System
from agent.system.journal import ERROR, say


class Asked(Protocol):
    """A request; each has another `id`."""

    @property
    def id(self) -> str: ...

    @property
    def locked(self) -> bool:
        """Whether the command keeps it locked. Those of release 0.1 do not."""


RequestT = TypeVar("RequestT", bound=Asked)


class WithdrawnError(Exception):
    """The host no longer wants it."""


def read_request(path: str, parse: Callable[[bytes], RequestT], system: System) -> RequestT | None:
    """Return what the host asks for; None if nothing, or if the command that has asked is gone."""
    try:
        request = parse(system.read(path, SIZE_LIMIT))
        return request if not request.locked or system.is_locked(path) else None
    except FileNotFoundError:
        return None


def serve(requested: Callable[[], RequestT | None], answer: Callable[[RequestT], None]) -> int:
    """Answer what is requested. Return 1 if the host has withdrawn a request, perhaps for another one; otherwise 0."""
    handled = ""
    try:
        # systemd's path unit misses a request that comes while the service runs.
        while (request := requested()) and request.id != handled:
            answer(request)
            handled = request.id
    except WithdrawnError:
        return 1
    except (AgentError, OSError) as error:
        say(ERROR, str(error))
    return 0
