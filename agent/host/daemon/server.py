"""Serves HTTP for Prometheus and probes. A request gets one of the pages that the loop has prepared."""

import contextlib
import errno
import io
import logging
import os
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer, TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct, field

from agent.model.errors import AgentError
from agent.model.text import one_line
from agent.system import opening
from agent.system.files import UCRED_SIZE

log = logging.getLogger(__name__)

CONNECTIONS = 8
"""How many connections are served at a time. A further connection does not wait: it takes another one's slot, or is
closed (Peers)."""
HEAD_BYTES = 16 * 1024
"""How long a request's head may be: the request line and the headers. http.server alone would read 100 lines of 64 KiB
each, and its parser takes 15 times that memory."""
HEAD_END = re.compile(rb"\n\r?\n")
ACCEPT_PAUSE = 0.1
"""Seconds to the next try after a connection could not be accepted, for example for lack of file descriptors."""
POLL = 3600.0
"""Seconds after which serve_forever checks again whether to stop. `stop` wakes it, so these checks can be rare."""
BACKLOG = 128
"""How many connections may wait to be accepted. If a burst fills the queue, the kernel drops a SYN, which costs the
peer a second."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""Allows only what the page at `/` has: styles, but no scripts or other resources."""
VERBOSE = "?verbose"
OPENMETRICS = "?openmetrics"
"""VERBOSE and OPENMETRICS are suffixes of paths in Site: the verbose form of a health page, and the OpenMetrics form of
/metrics."""
TCP_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTEN = "0A"
"""TCP_LISTEN (include/net/tcp_states.h), as column `st` of these tables shows it (proc(5))."""
SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
"""The netlink family, its one message type, and the flag of a request (linux/netlink.h, linux/sock_diag.h)."""
DIAG_REQUEST = "=LHHLL BBxxL"
"""struct nlmsghdr, and struct inet_diag_req_v2 without its last field (linux/inet_diag.h)."""
DIAG_SOCKET = "!HH16s16s"
"""struct inet_diag_sockid without the interface and the cookie: ports and addresses of both ends."""
DIAG_USER = 80
"""Where the user's id is in the answer: after nlmsghdr (16 bytes), four bytes, inet_diag_sockid (48), three numbers."""


class Page(Struct, frozen=True):
    """A prepared answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class Site(Struct, frozen=True):
    """Two sets of all pages, by path. `stale` is served if the loop has not published new pages for too long."""

    fresh: Mapping[str, Page] = field(default_factory=dict)
    stale: Mapping[str, Page] = field(default_factory=dict)
    fresh_until: float = 0.0
    """When `fresh` expires, by time.monotonic()."""


class Limits(Struct, frozen=True):
    """Time limits in seconds."""

    headers: float = 1.0
    """Limit until the request is complete, so that idle and trickling peers (slowloris) free their slots soon."""
    whole: float = 5.0
    """Limit for a whole connection."""


class Slot(Struct):
    """The slot of one connection."""

    peer: int | str
    """Who holds it: a user's id, or an address if the peer is on another host."""
    completed: float = 0.0
    """When the request was complete, by time.monotonic(); 0 until then."""


class Peers:
    """The connections that have a slot. Slots are limited, because any process on the host can open any number."""

    def __init__(self, slots: int) -> None:
        self._limit, self._lock = slots, threading.Lock()
        self.slots: dict[socket.socket, Slot] = {}
        """Oldest connection first."""

    def admit(self, connection: socket.socket, peer: int | str, patience: float) -> bool:
        """Give the connection a slot, and return whether there was one. If necessary, close another connection.

        A connection is idle until its request is complete, and again from `patience` seconds after that, because a peer
        should have read the answer by then. Idle ones go first, and those of the peer that has most. A busy one goes
        only if its peer still has more than `peer` afterwards, or as many, or if `peer` has none: so a peer, whatever
        it does, cannot keep others from being served, and neither can somebody with many addresses or user ids keep out
        one who comes from another.
        """
        with self._lock:
            if len(self.slots) >= self._limit:
                held, cutoff = Counter(slot.peer for slot in self.slots.values()), time.monotonic() - patience
                # A connection whose request is not complete has the time 0, so it is idle.
                idle = [each for each, slot in self.slots.items() if slot.completed < cutoff]
                ended = max(idle or self.slots, key=lambda each: held[self.slots[each].peer])
                if not idle and 0 < held[peer] >= held[self.slots[ended].peer] - 1:
                    return False
                del self.slots[ended]
                # After this, the thread of that connection reads end of file, and closes the connection.
                with contextlib.suppress(OSError):
                    ended.shutdown(socket.SHUT_RDWR)
            self.slots[connection] = Slot(peer)
        return True

    def request_complete(self, connection: socket.socket) -> None:
        """Record that the connection's request is complete."""
        with self._lock:
            if connection in self.slots:
                self.slots[connection].completed = time.monotonic()

    def leave(self, connection: socket.socket) -> None:
        """Free the slot of a connection that has ended."""
        with self._lock:
            self.slots.pop(connection, None)


class Handler(BaseHTTPRequestHandler):
    """Handles a connection: HTTP/1.0, one request each."""

    server: "Server"
    command = requestline = ""
    request_version = "HTTP/1.0"

    def handle(self) -> None:
        """Read the head within its limits, and answer the request. Nothing reads the body.

        A socket's time limit for receiving restarts with each byte, so what is left of it is set each time. The limit
        for sendall is one for the whole answer.
        """
        limits, head = self.server.limits, b""
        deadline = time.monotonic() + limits.headers
        while not (complete := HEAD_END.search(head, 0, HEAD_BYTES)) and len(head) < HEAD_BYTES:
            if (left := deadline - time.monotonic()) <= 0:
                return
            self.connection.settimeout(left)
            if not (part := self.connection.recv(HEAD_BYTES)):
                break
            head += part
        self.connection.settimeout(limits.whole - limits.headers)
        self.server.peers.request_complete(self.connection)
        if complete or len(head) < HEAD_BYTES:
            self.rfile = io.BytesIO(head)
            self.handle_one_request()
        elif b"\n" in head:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)

    def do_GET(self) -> None:
        """Send the page at the path."""
        url, site = urlsplit(self.path), self.server.site
        verbose = VERBOSE if "verbose" in url.query.split("&") else ""
        openmetrics = OPENMETRICS if "application/openmetrics-text" in self.headers.get("Accept", "") else ""
        pages = site.fresh if time.monotonic() < site.fresh_until else site.stale
        if page := pages.get(url.path + verbose + openmetrics) or pages.get(url.path):
            self._answer(page)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET  # noqa: N815 (http.server looks for this name)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send a short error in plain text. The base class calls this method too, such as for a malformed request."""
        # The base class sends 501 for a method that this class does not have.
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._answer(Page(status, f"{status.phrase}\n".encode()))

    def _answer(self, page: Page) -> None:
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", POLICY)
        if page.status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def version_string(self) -> str:
        return "unbounded-agent"

    def log_message(self, *_: object) -> None:
        """Write no access log: every scrape would add a line."""


class Server(ThreadingMixIn, TCPServer):
    """Serves `site` on a listening socket. The loop replaces `site` by one assignment, without a lock."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, site: Site | None = None, limits: Limits | None = None) -> None:
        BaseServer.__init__(self, listening.getsockname(), Handler)
        self.socket, self.site, self.limits = listening, site or Site(), limits or Limits()
        self.peers = Peers(CONNECTIONS)
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL,), name="http", daemon=True)
        self._thread.start()

    def get_request(self) -> tuple[socket.socket, object]:
        try:
            return super().get_request()
        except OSError:
            # The connection still waits. Without this pause, serve_forever would try again at once, and without end.
            time.sleep(ACCEPT_PAUSE)
            raise

    def process_request(self, request: Any, client_address: object) -> None:  # noqa: ANN401 (no datagrams here)
        if self.peers.admit(request, peer_user(request), self.limits.headers):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        """Free the slot of a connection that has ended, or for which no thread could be started."""
        self.peers.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors, such as a peer that hangs up or is too slow."""

    def stop(self) -> None:
        """Stop listening. Connections end by themselves within their limits."""
        # Shutting down a listening socket makes it readable, which wakes serve_forever.
        self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()
        self.server_close()
        self._thread.join(self.limits.whole)


def listen_on(address: str) -> socket.socket:
    """Listen on an address of the configuration, `HOST:PORT` or `[IPv6]:PORT`. Raises AgentError."""
    host, _, port = address.rpartition(":")
    listening = None
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        if listening:
            listening.close()
        why = f"cannot listen on {address}: {error.strerror}" if isinstance(error, OSError) else ""
        advice = "configure one of this host's addresses: `ip -brief address` lists them"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            if (user := listening_user(int(port))) is not None:
                why += f" by a process of user {user}, which answers Prometheus instead"
            advice = (
                f"configure another address or port, or stop the process that holds it: `ss -lntp 'sport = :{port}'`"
            )
        why = why or f"{address} is not a host: {error}"
        raise AgentError(f"configuration key metrics.address: {why}", advice) from error
    return listening


def listen_locally(directory: str, name: str) -> socket.socket:
    """Listen on the Unix socket `name`, to which only root may connect. It replaces one that an earlier process left.

    Raises AgentError.
    """
    listening = socket.socket(socket.AF_UNIX)
    try:
        descriptor = opening.open_probe(directory)
        try:
            # Use the directory's descriptor: the path may be too long for sun_path, which has room for 107 bytes.
            path = f"/proc/self/fd/{descriptor}/{name}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            # Other users can never connect: the file gets the socket's mode (unix_bind).
            os.fchmod(listening.fileno(), 0o600)
            listening.bind(path)
            listening.listen(BACKLOG)
        finally:
            os.close(descriptor)
    except OSError as error:
        listening.close()
        raise AgentError(
            f"{directory}/{name}: cannot listen: {error.strerror}",
            f"check that {directory} is a directory that the agent can write to",
        ) from error
    return listening


def listening_user(port: int) -> int | None:
    """Return the user id of the process that listens on a TCP port of any local address; None if none is found.

    Only processes in this network namespace are found. The process id is not returned, because finding it would need
    CAP_SYS_PTRACE.
    """
    for table in TCP_TABLES:
        with contextlib.suppress(OSError), opening.plain(table) as lines:
            for line in lines:
                # The fields are number, local address (hexadecimal, a colon before the port), remote address, state,
                # queues, timer, retransmissions and user (proc(5)).
                fields = line.decode(errors="replace").split()
                if len(fields) > 7 and fields[3] == LISTEN and fields[1].endswith(f":{port:04X}"):
                    return int(fields[7])
    return None


def peer_user(connection: socket.socket) -> int | str:
    """Return the id of the user at the other end of a stream connection; the address if that is not known.

    It is not known of another host or network namespace, or if the kernel lacks the module tcp_diag.
    """
    if connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_SIZE)
        return int.from_bytes(credentials[4:8], sys.byteorder)
    address = ""
    with contextlib.suppress(OSError):
        address, port = connection.getpeername()[:2]
        return _user_of(connection.family, (address, port), connection.getsockname()[:2])
    return address


def _user_of(family: int, local: tuple[str, int], remote: tuple[str, int]) -> int:
    """Return the user of the TCP socket of this network namespace that has these addresses. Raises OSError."""
    ports = local[1], remote[1]
    addresses = [socket.inet_pton(family, each.partition("%")[0]) for each in (local[0], remote[0])]
    cookie = bytes(4) + b"\xff" * 8
    wanted = struct.pack(DIAG_SOCKET, *ports, *addresses) + cookie
    size = struct.calcsize(DIAG_REQUEST) + len(wanted)
    head = struct.pack(
        DIAG_REQUEST, size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0, family, socket.IPPROTO_TCP, 0xFFFFFFFF
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, SOCK_DIAG) as kernel:
        kernel.send(head + wanted)
        # The kernel answers before send(2) returns.
        answer = kernel.recv(4096)
    if len(answer) < DIAG_USER + 4 or int.from_bytes(answer[4:6], sys.byteorder) != SOCK_DIAG_BY_FAMILY:
        raise OSError(errno.ENOENT, "the kernel knows no such socket")
    return int.from_bytes(answer[DIAG_USER : DIAG_USER + 4], sys.byteorder)


class Endpoint:
    """Servers on the sockets that systemd passed; if it passed none, a server on the configured address.

    systemd listens on its sockets even while the service does not run (systemd.socket(5)), so they are never shut down.
    If another process uses the address, `listen` can be called again later.
    """

    def __init__(self, address: str, inherited: Sequence[socket.socket] = ()) -> None:
        self.error = ""
        """Why the pages are not served; empty if they are."""
        self._address, self._site, self._inherited = address, Site(), inherited
        self._servers: list[Server] = []
        for each in inherited:
            log.info("serving on %s, on which systemd listens; metrics.address is not used", each.getsockname())
        self.listen()

    def publish(self, site: Site) -> None:
        """Serve these pages from now on."""
        self._site = site
        for server in self._servers:
            server.site = site
        # Accept connections on systemd's sockets only now: without pages, peers that have waited would get "Not Found".
        for each in self._inherited[len(self._servers) :]:
            self._servers.append(Server(each, site))

    def listen(self) -> None:
        """Start the server on the configured address, unless it runs or systemd passed sockets.

        The same failure is logged only once.
        """
        if self._servers or self._inherited:
            return
        try:
            self._servers, self.error = [Server(listen_on(self._address), self._site)], ""
        except AgentError as error:
            if error.message != self.error:
                log.error("cannot serve metrics and health pages; each pass tries again: %s", one_line(str(error)))
            self.error = error.message
        else:
            log.info("serving http://%s/metrics", self._address)

    def move(self, address: str) -> None:
        """Serve on another address. If it cannot be bound, raise AgentError and keep the old one.

        Do nothing if systemd passed sockets.
        """
        if address == self._address or self._inherited:
            return
        try:
            # The old server goes on until then: in a gap, another process could take its port and say anything.
            listening = listen_on(address)
        except AgentError as error:
            in_use = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if not in_use or address.rpartition(":")[2] != self._address.rpartition(":")[2]:
                raise
            # The old server may be in the way: no two sockets can listen on 127.0.0.1:PORT and 0.0.0.0:PORT.
            self._stop()
            try:
                listening = listen_on(address)
            except AgentError:
                self.listen()
                raise
        self._stop()
        self._servers, self.error, self._address = [Server(listening, self._site)], "", address
        log.info("serving http://%s/metrics", address)

    def _stop(self) -> None:
        while self._servers:
            self._servers.pop().stop()
