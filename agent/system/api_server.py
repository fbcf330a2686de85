"""The client of the API server: sends requests and watches, with the kubelet's identity.

The size of answers is limited, and so is the time for each request as a whole. The client uses no proxy and follows no
redirect. When the kubelet's certificate or a token is renewed, a new file replaces the old one, and is read again.

The kubeconfig (clientcmd/api/v1 of k8s.io/client-go) is YAML, which the standard library cannot read, so kubectl prints
it as JSON unless it is JSON already.
"""

import base64
import contextlib
import http.client
import json
import logging
import math
import os
import posixpath
import random
import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from agent.model.conditions import Reason
from agent.model.device import FileIdentity
from agent.model.errors import AgentError, DocumentError
from agent.model.json_document import in_json, parse_json, parse_object
from agent.model.text import one_line
from agent.system.deadlines import bounded
from agent.system.files import System

log = logging.getLogger(__name__)
T = TypeVar("T")

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

    def __init__(
        self, request: str, problem: str, status: int = 0, hint: str = "", details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"{request}: {problem}", hint)
        self.status = status
        self.details = details or {}
        """The server's StatusDetails (meta/v1), unchecked."""

    @property
    def unavailable(self) -> bool:
        """Whether the server did not answer, or cannot answer now."""
        return self.status in (0, HTTPStatus.TOO_MANY_REQUESTS) or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def reason(self) -> Reason:
        """The reason for a condition."""
        if self.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return Reason.REFUSED
        return Reason.API_UNREACHABLE if self.unavailable else Reason.FAILED


class NotFoundError(ApiError):
    """The object does not exist, or the server does not know its kind."""


class ConflictError(ApiError):
    """Somebody else has changed, created or deleted the object meanwhile: read it again."""


KINDS: Mapping[int, type[ApiError]] = {HTTPStatus.NOT_FOUND: NotFoundError, HTTPStatus.CONFLICT: ConflictError}


def api_error(request: str, status: int, body: bytes) -> ApiError:
    """Return the error for an answer with this status; `body` is usually a Status object (meta/v1)."""
    try:
        document = parse_json(body)
        document = document if isinstance(document, dict) else {}
        message, details = str(document.get("message") or ""), document.get("details")
    except ValueError:
        message, details = body.decode(errors="replace"), None
    text = one_line(message)[:SHOWN] or "no message"
    phrase = next((f" {each.phrase}" for each in HTTPStatus if each == status), "")
    hint = NO_DRA if status == HTTPStatus.NOT_FOUND and NO_SUCH_KIND in text else HINTS.get(status, "")
    kind, known = KINDS.get(status, ApiError), details if isinstance(details, dict) else None
    return kind(request, f"{status}{phrase}: {text}", status, hint, known)


SIZE_LIMIT = 1 << 18
"""Bytes of the largest kubeconfig, certificate or token that is read."""
KUBECTL_LIMIT = 15.0
"""Seconds for kubectl, which only reads the file."""
HTTPS_PORT = 443
UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that a text in JSON can have, but the name of a file or server cannot: a null character, or half a
surrogate pair."""

Material = str | bytes
"""A certificate, key or token: a file's path, or the content itself; empty if there is none."""


class Kubeconfig(NamedTuple):
    """The kubeconfig's current context: the address of the API server, and the credentials."""

    host: str
    port: int
    prefix: str
    """Path in the server's address, which precedes the path of every request; usually empty."""
    server_name: str
    """The name that the server's certificate must have."""
    ca: Material
    certificate: Material
    key: Material
    token: Material

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the kubeconfig names. They are replaced when credentials are renewed."""
        return tuple(each for each in self[4:] if each and isinstance(each, str))

    def __repr__(self) -> str:
        # Without the secrets.
        return f"<kubeconfig of {self.host}>"


def read_kubeconfig(system: System, path: str) -> Kubeconfig:
    """Return the current context of a kubeconfig. Raises AgentError or OSError."""
    content = system.read(path, SIZE_LIMIT)
    if not content.lstrip().startswith(b"{"):
        command = ("kubectl", "config", "view", "--raw", "--minify", "--output=json", f"--kubeconfig={path}")
        content = system.run(*command, timeout=KUBECTL_LIMIT).encode(errors="surrogateescape")
    return parse_kubeconfig(path, content)


def parse_kubeconfig(where: str, data: bytes) -> Kubeconfig:
    """Return the current context of a kubeconfig in JSON. Raises AgentError.

    `where` is the file's path. Relative paths in the file start at its directory.
    """
    document = parse_object(where, data)
    context = _named(where, document, "context", _text(where, document, "current-context"))
    cluster = _named(where, document, "cluster", _text(where, context, "cluster"))
    user = _named(where, document, "user", _text(where, context, "user"))
    if cluster.get("proxy-url"):
        problem = "it names a proxy (proxy-url), which is not supported here"
        raise AgentError(f"{where}: {problem}", "let the node reach the server directly")
    server, server_name = _text(where, cluster, "server"), _text(where, cluster, "tls-server-name")
    try:
        parts = urllib.parse.urlsplit(server)
        host, port = _host(parts.hostname or ""), parts.port or HTTPS_PORT
    except ValueError:
        parts, host, port = urllib.parse.urlsplit(""), "", 0
    if parts.scheme != "https":
        # Without the user, which could have a password.
        shown = server.rpartition("@")[2][:100]
        raise DocumentError(f"{where}: key server must be an https:// address, not {shown!a}")
    try:
        server_name = _host(server_name or host)
    except ValueError:
        raise DocumentError(f"{where}: key tls-server-name must be a host's name, not {server_name[:100]!a}") from None
    kubeconfig = Kubeconfig(
        host,
        port,
        parts.path.rstrip("/"),
        server_name,
        ca=_material(where, cluster, "certificate-authority"),
        certificate=_material(where, user, "client-certificate"),
        key=_material(where, user, "client-key"),
        # The file takes precedence over inline data, because the token in the file is renewed.
        token=_path(where, user, "tokenFile") or _text(where, user, "token").encode(),
    )
    if not (kubeconfig.certificate and kubeconfig.key) and not kubeconfig.token:
        raise DocumentError(
            f"{where}: the user has neither a client certificate with its key nor a token",
            "join the node with a client certificate (TLS bootstrap) or a token file: no other kind is supported",
        )
    return kubeconfig


def _host(name: str) -> str:
    """Return the name of a host. Raises ValueError, as a connection would do later and leave its socket open."""
    name.encode("idna")
    if not name or " " in name or not name.isprintable():
        raise ValueError
    return name


def _named(where: str, document: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    """Return the entry with this name in a list such as `clusters`. Raises DocumentError."""
    listed = document.get(f"{kind}s")
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict) and each.get("name") == name and isinstance(found := each.get(kind), dict):
            return found
    raise DocumentError(f"{where}: the current {kind} is {name[:100]!a}, which is not in `{kind}s`")


def _text(where: str, document: dict[str, Any], key: str) -> str:
    value = document.get(key) or ""
    if not isinstance(value, str):
        raise DocumentError(f"{where}: key {key} must be a string, not {in_json(value)}")
    if UNUSABLE.search(value):
        raise DocumentError(f"{where}: key {key} has characters that are not allowed")
    return value


def _material(where: str, entry: dict[str, Any], key: str) -> Material:
    """Return inline data, which takes precedence, or a file's path."""
    try:
        return base64.b64decode(_text(where, entry, f"{key}-data"), validate=True) or _path(where, entry, key)
    except ValueError:
        # Without the cause, which could have a part of a key.
        raise DocumentError(f"{where}: key {key}-data is not base64") from None


def _path(where: str, entry: dict[str, Any], key: str) -> str:
    path = _text(where, entry, key)
    return posixpath.join(posixpath.dirname(where), path) if path else ""


def client_context(ca: bytes | None) -> ssl.SSLContext:
    """Return TLS settings that accept what Kubernetes' own clients accept.

    Those are written in Go, whose verification (crypto/x509) is mostly less strict than Python's default. `ca` has the
    accepted CAs' certificates in PEM format. Raises ValueError or ssl.SSLError if it contains none. If `ca` is None,
    the CAs that the host trusts are used.
    """
    # Not ssl.create_default_context: since Python 3.13, it refuses certificates without key identifiers.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # TLS 1.2 is the oldest version that the API server accepts by default (tls-min-version).
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Accept a CA that is not a root CA: the CA of a cluster may be an intermediate CA of a company.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # Go looks for the server's name only in subjectAltName.
    context.hostname_checks_common_name = False
    if ca is None:
        context.load_default_certs()
    else:
        # Between certificates, there may be comments in any language. Python accepts ASCII only.
        context.load_verify_locations(cadata=ca.decode("ascii", errors="ignore"))
    return context


class Session(NamedTuple):
    """The credentials of connections. When a file changes, new connections use a new session."""

    kubeconfig: Kubeconfig
    context: ssl.SSLContext
    headers: Mapping[str, str]

    def __repr__(self) -> str:
        return f"<session of {self.kubeconfig.host}>"


class Credentials:
    """The kubelet's identity towards the API server. Threads may share it."""

    def __init__(self, system: System, path: str) -> None:
        """`path` is that of the kubeconfig, which is read at the first call of `session`."""
        self._system, self._path = system, path
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._seen: dict[str, FileIdentity | None] = {}
        """The identities of the kubeconfig and of the files that it names, taken before these were last read."""

    def session(self) -> Session:
        """Return the session for a new connection or request. Raises AgentError, which names the unusable file."""
        with self._lock:
            if self._session is None or self._seen != {path: self._identity(path) for path in self._seen}:
                self._session = None
                before = self._identity(self._path)
                try:
                    kubeconfig = read_kubeconfig(self._system, self._path)
                except OSError as error:
                    why = f"cannot read the kubelet's kubeconfig: {error.strerror}"
                    raise AgentError(f"{self._path}: {why}") from error
                self._seen = {self._path: before} | {path: self._identity(path) for path in kubeconfig.files}
                self._session = self._make(kubeconfig)
            return self._session

    def _identity(self, path: str) -> FileIdentity | None:
        with contextlib.suppress(OSError, ValueError):
            return self._system.identity(path)
        return None

    def _make(self, kubeconfig: Kubeconfig) -> Session:
        try:
            context = client_context(self._content(kubeconfig.ca) if kubeconfig.ca else None)
            context.set_alpn_protocols(["http/1.1"])
            if kubeconfig.certificate and kubeconfig.key:
                # By way of files in memory: OpenSSL takes them only from files, and could block while it reads the
                # original ones.
                with contextlib.ExitStack() as stack:
                    places = []
                    for material in (kubeconfig.certificate, kubeconfig.key):
                        file = stack.enter_context(open(os.memfd_create("tls", os.MFD_CLOEXEC), "wb", buffering=0))
                        file.write(self._content(material))
                        places.append(f"/proc/self/fd/{file.fileno()}")
                    context.load_cert_chain(places[0], places[1], _no_password)
            token = self._content(kubeconfig.token).decode("ascii").strip()
        except (ssl.SSLError, ValueError) as error:
            files = ", ".join(kubeconfig.files) or "inline data"
            reason = getattr(error, "reason", None) or "not PEM"
            raise AgentError(f"{self._path}: a certificate, key or token is unusable ({reason}): {files}") from None
        except OSError as error:
            # For example, there may be no memory or file descriptor left.
            raise AgentError(f"{self._path}: cannot load its credentials: {error.strerror}") from error
        # http.client refuses headers with line breaks, and its error would quote the token.
        if " " in token or not token.isprintable():
            where = kubeconfig.token if isinstance(kubeconfig.token, str) else f"{self._path}: key token"
            raise AgentError(
                f"{where}: the token has a space, a line break or a control character", "write it there on one line"
            )
        return Session(kubeconfig, context, {"Authorization": f"Bearer {token}"} if token else {})

    def _content(self, material: Material) -> bytes:
        if isinstance(material, bytes) or not material:
            return material or b""
        try:
            return self._system.read(material, SIZE_LIMIT)
        except OSError as error:
            why = f"cannot read this file of the kubelet's kubeconfig: {error.strerror}"
            raise AgentError(f"{material}: {why}") from error


def _no_password() -> str:
    """Refuse keys with a password. Without this function, OpenSSL would ask for the password on the terminal."""
    raise ValueError


REQUEST_LIMIT = 10.0
"""Seconds that a request may take, from looking up the server's name to the last byte of the answer."""
ANSWER_LIMIT = 8 << 20
"""Bytes of the largest answer, and of the largest event of a watch. An object in etcd has at most 1.5 MiB."""
WATCH_LIMIT = 300
"""Seconds after which the server ends a watch, so that the next one uses current credentials."""
WATCH_MARGIN = 30.0
"""How many seconds longer than WATCH_LIMIT a watch may last."""
SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
)
"""With these, TCP gives up on a peer that acknowledges nothing for 20 s (tcp(7))."""


class ApiClient:
    """Asks the API server for objects, changes them and watches them. Threads may share it.

    Each request has a connection of its own: there are few, and a handshake takes milliseconds.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """Return the object or list. Raises ApiError, or AgentError if the credentials are unusable."""
        return self.request("GET", _with_query(path, parameters))

    def request(self, method: str, path: str, content: object = None) -> dict[str, Any]:
        """Return the answer to a request. Raises what `get` raises.

        `content` is sent as JSON, with PATCH as a strategic merge patch; None means no body.
        """
        what, connection = f"{method} {path.partition('?')[0]}", _Connection(self._credentials.session())

        def ask() -> tuple[int, bytes]:
            with contextlib.closing(connection):
                response = connection.ask(method, path, content)
                return response.status, response.read(ANSWER_LIMIT + 1)

        status, body = connection.bounded(what, ask, REQUEST_LIMIT)
        if len(body) > ANSWER_LIMIT:
            raise ApiError(what, f"the answer has more than {ANSWER_LIMIT} bytes")
        if status >= 300:
            raise api_error(what, status, body)
        return _object(what, body)

    def watch(self, path: str, version: str, **parameters: str) -> Generator[dict[str, Any], None, None]:
        """Yield the changes since a list, until the server ends the watch. `version` is the list's resourceVersion.

        The first item is no event but an empty object, which is yielded when the server has accepted the watch. Raises
        what `get` raises, also if the server no longer has the events after `version`.
        """
        query = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_LIMIT), **parameters}
        what, connection = f"watch {path}", _Connection(self._credentials.session())
        place = _with_query(path, query | {"resourceVersion": version})

        def ask() -> tuple[http.client.HTTPResponse, bytes]:
            response = connection.ask("GET", place, None)
            return response, response.read(ANSWER_LIMIT) if response.status >= 300 else b""

        end = time.monotonic() + WATCH_LIMIT + WATCH_MARGIN
        try:
            response, body = connection.bounded(what, ask, REQUEST_LIMIT)
            if response.status >= 300:
                raise api_error(what, response.status, body)
            yield {}
            while line := connection.bounded(what, lambda: response.readline(ANSWER_LIMIT + 1), end - time.monotonic()):
                if len(line) > ANSWER_LIMIT:
                    raise ApiError(what, f"an event has more than {ANSWER_LIMIT} bytes")
                yield _event(what, line)
        finally:
            connection.close()


class _Connection(http.client.HTTPSConnection):
    """A connection to the server, whose certificate must have the name that the kubeconfig gives the server."""

    def __init__(self, session: Session) -> None:
        kubeconfig = session.kubeconfig
        super().__init__(kubeconfig.host, kubeconfig.port, timeout=REQUEST_LIMIT, context=session.context)
        self._session = session
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        """The answer. It keeps the socket open until it is closed itself."""
        self._given_up = False
        """Whether the caller has stopped waiting for an answer."""

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        for option in SOCKET_OPTIONS:
            self.sock.setsockopt(*option)
        name = self._session.kubeconfig.server_name
        self._socket = self.sock = self._session.context.wrap_socket(self.sock, server_hostname=name)
        # From now on, `bounded` ends what takes too long.
        self.sock.settimeout(None)
        # Only now: whoever gave up before did not see this socket.
        if self._given_up:
            raise TimeoutError

    def bounded(self, what: str, ask: Callable[[], T], seconds: float) -> T:
        """Return what `ask` returns within `seconds`, however often the server sends a byte. Raises ApiError."""
        try:
            return bounded(what, ask, seconds)
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._given_up = True
            if self._socket is not None:
                # Not closed here: this ends the call that still waits.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            raise self.failure(what, error) from error

    def ask(self, method: str, path: str, content: object) -> http.client.HTTPResponse:
        """Send a request, and return the answer's head. Raises OSError, ValueError or HTTPException."""
        headers = {"Accept": "application/json", "User-Agent": "unbounded-agent", **self._session.headers}
        body = None
        if content is not None:
            kind = "strategic-merge-patch+json" if method == "PATCH" else "json"
            body, headers["Content-Type"] = json.dumps(content).encode(), f"application/{kind}"
        self.request(method, self._session.kubeconfig.prefix + path, body, headers)
        self._response = self.getresponse()
        return self._response

    def failure(self, what: str, error: Exception) -> ApiError:
        host = f"[{self.host}]" if ":" in self.host else self.host
        where = f"https://{host}:{self.port}"
        if isinstance(error, ssl.SSLCertVerificationError):
            problem = f"the certificate of {where} is not accepted: {error.verify_message}"
            return ApiError(what, problem, hint="see the certificate authority in the kubelet's kubeconfig")
        if isinstance(error, ssl.SSLError):
            return ApiError(what, f"the TLS connection to {where} failed: {error.reason or error}")
        late = isinstance(error, TimeoutError)
        cause = "timed out" if late else getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ApiError(what, f"no answer from {where}: {cause}")

    def close(self) -> None:
        super().close()
        # http.client gives up an answer with `Connection: close` to whoever reads it.
        if self._response is not None:
            self._response.close()


def _with_query(path: str, parameters: Mapping[str, str]) -> str:
    return f"{path}?{urllib.parse.urlencode(parameters)}" if parameters else path


def _object(what: str, data: bytes) -> dict[str, Any]:
    try:
        answer = parse_json(data)
    except ValueError as error:
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
        raise api_error(what, code if isinstance(code, int) else 0, json.dumps(status).encode())
    return event


SHORT_PAUSE, LONG_PAUSE = 0.4, 15.0
"""Seconds from the end of a watch to the next one; the long pause from the second one in a row that has not lasted."""
LASTED = 10.0
"""Seconds after which a watch counts as having lasted. Some proxies end each watch at once."""
LOGGED_FAILURE = 2
"""How many failures in a row cause a log message. A single failure is usual: servers and load balancers end watches."""


class Watcher(threading.Thread):
    """Watches one list of objects until `stop`."""

    def __init__(self, client: ApiClient, path: str, selector: str, changed: Callable[[], None]) -> None:
        """Set what is watched. `selector` is a field selector. The watcher's thread calls `changed` after each change.

        It also calls `changed` each time the watch begins, unless it goes on where the last one has ended.
        """
        super().__init__(name=f"watch {path}", daemon=True)
        self._client, self._path, self._selector, self._changed = client, path, selector, changed
        self._stopped = threading.Event()
        self._failures = 0
        """Attempts that have failed since the watch last began."""
        self._began = math.inf
        """When the watch began, by time.monotonic(); infinity before the server has accepted it."""
        self._version = ""
        """The resourceVersion at which the last watch has ended; empty if the objects have to be listed first."""
        self.watching = False
        """Whether each change is noticed at once now."""

    def run(self) -> None:
        short = 0
        while not self._stopped.is_set():
            self._began = math.inf
            try:
                self._watch()
            except AgentError as error:
                self.watching, self._version = False, ""
                self._failures += 1
                if self._failures == LOGGED_FAILURE:
                    log.warning("changes to %s are noticed up to a minute late: %s", self._path, error)
            short = 0 if time.monotonic() - self._began >= LASTED else short + 1
            # If the API server fails, all nodes lose it at the same moment. They should not all return at the same
            # moment, so the pause is random.
            self._stopped.wait((LONG_PAUSE if short > 1 else SHORT_PAUSE) * random.uniform(0.5, 1.0))

    def stop(self) -> None:
        """Make the thread end when the current watch ends."""
        self._stopped.set()

    def _watch(self) -> None:
        """Follow changes until the server ends the watch, which it does every few minutes. Raises AgentError."""
        resumed = bool(self._version)
        if not resumed:
            self._version = self._list()
        for event in self._client.watch(self._path, self._version, fieldSelector=self._selector):
            # The first event is empty, and says that the server has accepted the watch. It counts as a change after a
            # list, because the objects may have changed between the caller's last reading and the list.
            changed = event.get("type") != "BOOKMARK" if event else not resumed
            if self._failures >= LOGGED_FAILURE:
                log.info("changes to %s are noticed at once again", self._path)
            self._failures = 0
            self._began = min(self._began, time.monotonic())
            self._version = _version(event.get("object")) or self._version
            # A bookmark is no change: it only has a newer resourceVersion.
            if changed and not self._stopped.is_set():
                self._changed()
            # Only now: until `changed` is called, the caller must not rely on this watch.
            self.watching = True

    def _list(self) -> str:
        version = _version(self._client.get(self._path, fieldSelector=self._selector))
        if not version:
            raise ApiError(f"GET {self._path}", "the list has no resourceVersion")
        return version


def _version(document: object) -> str:
    metadata = document.get("metadata") if isinstance(document, dict) else None
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    return version if isinstance(version, str) else ""
