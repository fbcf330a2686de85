"""The errors of requests to the API server, with hints on what to do next."""

import json
from collections.abc import Mapping
from http import HTTPStatus

from agent.model.errors import AgentError
from agent.model.reasons import Reason
from agent.model.text import one_line

HINTS: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "the kubelet's certificate or token is not accepted: see `journalctl -u kubelet`",
    HTTPStatus.FORBIDDEN: "check that the kubelet's identity is system:node:NAME in group system:nodes, that the API "
    "server has authorization mode Node, and that Kubernetes is 1.36 or newer",
    HTTPStatus.UNPROCESSABLE_ENTITY: "report this as a bug of unbounded-agent",
}
NO_SUCH_KIND = "could not find the requested resource"
"""Part of the server's message if it does not know the kind of an object (NewGenericServerResponse of apimachinery)."""
NO_DRA = "Dynamic Resource Allocation (resource.k8s.io/v1, with device taints) needs Kubernetes 1.36 or newer"
SHOWN = 600
"""Characters of the server's message that are shown."""


class ApiError(AgentError):
    """A request failed. `status` is the server's HTTP status; 0 without a usable answer."""

    def __init__(self, request: str, problem: str, status: int = 0, hint: str = "") -> None:
        super().__init__(f"{request}: {problem}", hint)
        self.status = status

    @property
    def reason(self) -> Reason:
        """Return the reason for a condition."""
        if self.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return Reason.REFUSED
        unavailable = not self.status or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return Reason.API_UNREACHABLE if unavailable or self.status == HTTPStatus.TOO_MANY_REQUESTS else Reason.FAILED


class NotFoundError(ApiError):
    """The object does not exist, or the server does not know its kind."""


class ConflictError(ApiError):
    """Somebody else has changed, created or deleted the object meanwhile: read it again."""


class OutdatedError(ApiError):
    """The server no longer has the events after a watch's resourceVersion (410 Gone): list the objects again."""


KINDS: Mapping[int, type[ApiError]] = {
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.CONFLICT: ConflictError,
    HTTPStatus.GONE: OutdatedError,
}


def api_error(request: str, status: int, body: bytes) -> ApiError:
    """Return the error for an answer with this status; `body` is usually a Status object (meta/v1)."""
    try:
        document = json.loads(body)
        message = str(document.get("message") or "") if isinstance(document, dict) else ""
    except (ValueError, RecursionError):
        message = body.decode(errors="replace")
    text = one_line(message)[:SHOWN] or "no message"
    phrase = next((f" {each.phrase}" for each in HTTPStatus if each == status), "")
    hint = NO_DRA if status == HTTPStatus.NOT_FOUND and NO_SUCH_KIND in text else HINTS.get(status, "")
    return KINDS.get(status, ApiError)(request, f"{status}{phrase}: {text}", status, hint)
