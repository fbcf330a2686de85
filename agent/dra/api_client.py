"""Sends requests and watches to the API server, with the kubelet's identity.

The size of answers is limited, and so is the time for each request as a whole. The client keeps connections open for
further requests, because a TLS handshake takes longer than a request. It uses no proxy and follows no redirect.
"""

import errno
import http.client
import json
import math
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Generator, Mapping
from typing import Any

from agent.dra.api_errors import ApiError, OutdatedError, api_error
from agent.dra.credentials import Credentials, Session
from agent.model.errors import AgentError
from agent.model.json_document import in_json
from agent.system.deadlines import bounded

REQUEST_LIMIT = 10.0
"""Seconds that a request may take, from looking up the server's name to the last byte of the answer."""
ANSWER_LIMIT = 8 << 20
"""Bytes of the largest answer, and of the largest event of a watch. An object in etcd has at most 1.5 MiB."""
IDLE_CONNECTIONS = 4
"""How many idle connections are kept."""
IDLE_LIMIT = 60.0
"""Seconds after which an idle connection is not used again, because load balancers drop idle connections."""
WATCH_LIMIT = 300
"""Seconds after which the server ends a watch, so that the next one uses current credentials."""
WATCH_MARGIN = 30.0
"""How many seconds longer than WATCH_LIMIT a watch may last."""
UNANSWERED_LIMIT = 20_000
"""Milliseconds after which TCP gives up on a peer that acknowledges nothing (TCP_USER_TIMEOUT in tcp(7))."""
CLOSED_BY_SERVER = (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected, ssl.SSLEOFError)
"""Errors that a request can end with if it uses an idle connection that the server has closed."""


class ApiClient:
    """Asks the API server for objects, changes them and watches them. Threads may share it."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._lock = threading.Lock()
        self._idle: list[tuple[float, Session, _Connection]] = []
        self._closed = False

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """Return the object or list. Raises ApiError, or AgentError if the credentials are unusable."""
        return self.request("GET", _with_query(path, parameters))

    def request(self, method: str, path: str, content: object = None) -> dict[str, Any]:
        """Return the answer to a request. `content` is sent as JSON; None means no body. Raises what `get` raises."""
        session, connection, reused = self._connection()
        what = f"{method} {path.partition('?')[0]}"
        deadline = time.monotonic() + REQUEST_LIMIT
        try:
            connection.set_deadline(deadline)
            try:
                response = _send(connection, session, method, path, content)
            except CLOSED_BY_SERVER:
                # If the connection was an idle one, send the request again, once. That is safe even if the server has
                # already served the request: a slice is written with a resourceVersion or a fixed name, so a second
                # write fails with a conflict, and a second eviction of a pod changes nothing.
                connection.close()
                if not reused:
                    raise
                connection = _Connection(session)
                connection.set_deadline(deadline)
                response = _send(connection, session, method, path, content)
            body = _bounded(response.read(ANSWER_LIMIT + 1), what)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _no_answer(what, session, error) from error
        except BaseException:
            connection.close()
            raise
        self._keep(session, connection, response)
        if response.status >= 300:
            raise api_error(what, response.status, body)
        return _object(what, body)

    def watch(self, path: str, version: str, **parameters: str) -> Generator[dict[str, Any], None, None]:
        """Yield the changes since a list, until the server ends the watch. `version` is the list's resourceVersion.

        The first item is no event but an empty object, which is yielded when the server has accepted the watch. Raises
        what `get` raises, and OutdatedError if the server no longer has the events after `version`.
        """
        query = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_LIMIT), **parameters}
        session, what = self._credentials.session(), f"watch {path}"
        connection = _Connection(session)
        try:
            connection.set_deadline(time.monotonic() + REQUEST_LIMIT)
            response = _send(connection, session, "GET", _with_query(path, query | {"resourceVersion": version}), None)
            if response.status >= 300:
                raise api_error(what, response.status, response.read(ANSWER_LIMIT))
            connection.set_deadline(time.monotonic() + WATCH_LIMIT + WATCH_MARGIN)
            yield {}
            while line := _bounded(response.readline(ANSWER_LIMIT + 1), what):
                yield _event(what, line)
        except (OSError, http.client.HTTPException) as error:
            raise _no_answer(what, session, error) from error
        finally:
            connection.close()

    def close(self) -> None:
        """Close the idle connections. From now on, a request closes its own: threads may still wait for answers."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop()[2].close()

    def _connection(self) -> "tuple[Session, _Connection, bool]":
        """Return the session, a connection that belongs to it, and whether that connection was used before."""
        session = self._credentials.session()
        with self._lock:
            while self._idle:
                since, opened_by, connection = self._idle.pop()
                if opened_by is session and time.monotonic() - since < IDLE_LIMIT:
                    return session, connection, True
                connection.close()
        return session, _Connection(session), False

    def _keep(self, session: Session, connection: "_Connection", response: http.client.HTTPResponse) -> None:
        with self._lock:
            reusable = response.isclosed() and not response.will_close and not self._closed
            if reusable and len(self._idle) < IDLE_CONNECTIONS:
                self._idle.append((time.monotonic(), session, connection))
            else:
                connection.close()


class _Deadline:
    """When a request or watch must have ended, by time.monotonic(). One connection serves one after the other."""

    at = math.inf

    def remaining(self) -> float:
        """Return the seconds that are left. Raises TimeoutError if there are none."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


class _Socket(ssl.SSLSocket):
    """A socket whose reads and writes end at a deadline, however often its peer sends a byte."""

    deadline: _Deadline | None = None

    def _limit(self) -> None:
        if self.deadline is not None:
            self.settimeout(self.deadline.remaining())

    # These are the methods that http.client and io.BufferedReader call.

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:  # noqa: ANN401
        self._limit()
        return super().recv_into(buffer, nbytes, flags)

    def send(self, data: Any, flags: int = 0) -> int:  # noqa: ANN401
        # ssl.SSLSocket.sendall calls it for each part.
        self._limit()
        return super().send(data, flags)


class _Connection(http.client.HTTPSConnection):
    """A connection that notices a peer that no longer answers, or answers too slowly.

    The server's certificate must have the name that the kubeconfig gives the server.
    """

    def __init__(self, session: Session) -> None:
        kubeconfig = session.kubeconfig
        super().__init__(kubeconfig.host, kubeconfig.port, context=session.context)
        self._session, self._deadline = session, _Deadline()
        self._response: http.client.HTTPResponse | None = None
        """The last answer. It keeps the socket open until it is closed itself."""

    def set_deadline(self, deadline: float) -> None:
        """Set when the current request or watch must have ended, by time.monotonic()."""
        self._deadline.at = deadline

    def connect(self) -> None:
        plain = self._connected()
        try:
            plain.settimeout(self._deadline.remaining())
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_LIMIT)
            name = self._session.kubeconfig.server_name
            self._session.context.sslsocket_class = _Socket
            wrapped = self._session.context.wrap_socket(plain, server_hostname=name)
            assert isinstance(wrapped, _Socket)
            wrapped.deadline = self._deadline
            self.sock = wrapped
        except BaseException:
            plain.close()
            raise

    def getresponse(self) -> http.client.HTTPResponse:
        self._response = super().getresponse()
        return self._response

    def close(self) -> None:
        super().close()
        # http.client gives up an answer with `Connection: close` to whoever reads it.
        if self._response is not None:
            self._response.close()

    def _connected(self) -> socket.socket:
        """Return a TCP connection to one of the server's addresses. Raises OSError."""
        # Looking up a name cannot be ended, only be abandoned.
        addresses = bounded(
            f"look up {self.host}",
            lambda: socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM),
            self._deadline.remaining(),
        )
        failed = OSError(errno.EADDRNOTAVAIL, "its name has no address")
        for family, kind, protocol, _, address in addresses:
            plain = socket.socket(family, kind, protocol)
            try:
                plain.settimeout(self._deadline.remaining())
                plain.connect(address)
                return plain
            except OSError as error:
                plain.close()
                failed = error
        raise failed


def _send(
    connection: http.client.HTTPSConnection, session: Session, method: str, path: str, content: object
) -> http.client.HTTPResponse:
    headers = {"Accept": "application/json", "User-Agent": "unbounded-agent", **session.headers}
    body = None
    if content is not None:
        body, headers["Content-Type"] = json.dumps(content).encode(), "application/json"
    connection.request(method, session.kubeconfig.prefix + path, body, headers)
    return connection.getresponse()


def _with_query(path: str, parameters: Mapping[str, str]) -> str:
    return f"{path}?{urllib.parse.urlencode(parameters)}" if parameters else path


def _bounded(data: bytes, what: str) -> bytes:
    if len(data) > ANSWER_LIMIT:
        raise ApiError(what, f"the answer has more than {ANSWER_LIMIT} bytes")
    return data


def _object(what: str, data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(what, f"the answer is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise ApiError(what, f"the answer is not an object but {in_json(answer)}")
    return answer


def _event(what: str, line: bytes) -> dict[str, Any]:
    """Return an event of a watch (WatchEvent of meta/v1). An event of type ERROR is raised as ApiError."""
    event = _object(what, line)
    if event.get("type") == "ERROR":
        status = event.get("object")
        code = status.get("code") if isinstance(status, dict) else None
        error = api_error(what, code if isinstance(code, int) else 0, json.dumps(status).encode())
        raise error if isinstance(error, OutdatedError) else ApiError(what, error.message, error.status)
    return event


def _no_answer(what: str, session: Session, error: Exception) -> AgentError:
    kubeconfig = session.kubeconfig
    host = f"[{kubeconfig.host}]" if ":" in kubeconfig.host else kubeconfig.host
    where = f"https://{host}:{kubeconfig.port}"
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = f"the certificate of {where} is not accepted: {error.verify_message}"
        return ApiError(what, problem, hint="see the certificate authority in the kubelet's kubeconfig")
    if isinstance(error, ssl.SSLError):
        return ApiError(what, f"the TLS connection to {where} failed: {error.reason or error}")
    cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ApiError(what, f"no answer from {where}: {cause}")
