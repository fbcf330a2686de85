"""Serves what the host asks for in a document of the handoff directory, one request after the other."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from agent.model.errors import AgentError
from agent.system.journal import ERROR, say


class Asked(Protocol):
    """A request; each has another `id`."""

    @property
    def id(self) -> str: ...


RequestT = TypeVar("RequestT", bound=Asked)


class WithdrawnError(Exception):
    """The host no longer wants it."""


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
