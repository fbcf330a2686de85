"""Serves HTTP for Prometheus and probes. A request gets one of the pages that the loop has prepared."""

import contextlib
import errno
import io
import logging
import os
import socket
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
from agent.system.sockets import listening_user, peer_user

log = logging.getLogger(__name__)


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
        should have read the answer by then.
        """
        with self._lock:
            if len(self.slots) >= self._limit:
                ended = self._dispensable(peer, time.monotonic() - patience)
                if ended is None:
                    return False
                del self.slots[ended]
                # After this, the thread of that connection reads end of file, and closes the connection.
                with contextlib.suppress(OSError):
                    ended.shutdown(socket.SHUT_RDWR)
            self.slots[connection] = Slot(peer)
        return True

    def _dispensable(self, peer: int | str, cutoff: float) -> socket.socket | None:
        """Return the connection that ends in favour of a new one of `peer`; None if the new one is refused.

        Idle ones go first, and those of the peer that has most. A busy one goes only if its peer still has more than
        `peer` afterwards, or as many, or if `peer` has none: so a peer, whatever it does, cannot keep others from being
        served, and neither can somebody with many addresses or user ids keep out one who comes from another.
        """
        held = Counter(slot.peer for slot in self.slots.values())
        # A connection whose request is not complete has the time 0, so it is idle.
        idle = [each for each, slot in self.slots.items() if slot.completed < cutoff]
        ended = max(idle or self.slots, key=lambda each: held[self.slots[each].peer])
        return ended if idle or not held[peer] or held[self.slots[ended].peer] > held[peer] + 1 else None

    def request_complete(self, connection: socket.socket) -> None:
        """Record that the connection's request is complete."""
        with self._lock:
            if connection in self.slots:
                self.slots[connection].completed = time.monotonic()

    def leave(self, connection: socket.socket) -> None:
        """Free the slot of a connection that has ended."""
        with self._lock:
            self.slots.pop(connection, None)


CONNECTIONS = 8
"""How many connections are served at a time. A further connection does not wait: it takes another one's slot, or is
closed (Peers)."""
HEAD_BYTES = 16 * 1024
"""How long a request's head may be: the request line and the headers. http.server alone would read 100 lines of 64 KiB
each, and its parser takes 15 times that memory."""
ACCEPT_PAUSE = 0.1
"""Seconds to the next try after a connection could not be accepted, for example for lack of file descriptors."""
POLL = 3600.0
"""Seconds after which serve_forever checks again whether to stop. `stop` wakes it, so these checks can be rare."""
PLAIN = "text/plain; charset=utf-8"
BACKLOG = 128
"""How many connections may wait to be accepted. If a burst fills the queue, the kernel drops a SYN, which costs the
peer a second."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
VERBOSE = "?verbose"
OPENMETRICS = "?openmetrics"
"""VERBOSE and OPENMETRICS are suffixes of paths in Site: the verbose form of a health page, and the OpenMetrics form of
/metrics."""


class Page(Struct, frozen=True):
    """A prepared answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = PLAIN


class Site(Struct, frozen=True):
    """Two sets of all pages, by path. `stale` is served if the loop has not published new pages for too long."""

    fresh: Mapping[str, Page] = field(default_factory=dict)
    stale: Mapping[str, Page] = field(default_factory=dict)
    fresh_until: float = 0.0
    """When `fresh` expires, by time.monotonic()."""

    def page(self, path: str, verbose: bool, openmetrics: bool, now: float) -> Page | None:
        """Return the page for a request at `now`; None for an unknown path."""
        pages = self.fresh if now < self.fresh_until else self.stale
        key = path + (VERBOSE if verbose else "") + (OPENMETRICS if openmetrics else "")
        return pages.get(key) or pages.get(path)


NO_PAGES = Site()


class Limits(Struct, frozen=True):
    """Time limits in seconds."""

    headers: float = 1.0
    """Limit until the request is complete, so that idle and trickling peers (slowloris) free their slots soon."""
    whole: float = 5.0
    """Limit for a whole connection."""


LIMITS = Limits()


class Handler(BaseHTTPRequestHandler):
    """Handles a connection: HTTP/1.0, one request each."""

    server: "Server"

    def setup(self) -> None:
        super().setup()
        # The base class sets these only after it has read the request line, and an answer needs them.
        self.command, self.requestline, self.request_version = "", "", "HTTP/1.0"
        self._hang_up_after(self.server.limits.headers)

    def handle_one_request(self) -> None:
        """Read the head within its limit, and answer the request. Nothing reads the body."""
        lines, left = list[bytes](), HEAD_BYTES
        while left:
            lines.append(self.rfile.readline(left))
            left -= len(lines[-1])
            if lines[-1] in (b"\r\n", b"\n", b""):
                self.rfile = io.BytesIO(b"".join(lines))
                super().handle_one_request()
                return
        first = len(lines) == 1
        self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG if first else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def finish(self) -> None:
        self._timer.cancel()
        with contextlib.suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        """Send the page at the path."""
        self.server.peers.request_complete(self.connection)
        self._timer.cancel()
        self._hang_up_after(self.server.limits.whole - self.server.limits.headers)
        url = urlsplit(self.path)
        openmetrics = "application/openmetrics-text" in self.headers.get("Accept", "")
        verbose = "verbose" in url.query.split("&")
        page = self.server.site.page(url.path, verbose, openmetrics, time.monotonic())
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._answer(page)

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
        # The policy allows only what the page at `/` has: styles, but no scripts or other resources.
        self.send_header("Content-Security-Policy", POLICY)
        if page.status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def _hang_up_after(self, seconds: float) -> None:
        # A socket's own timeout restarts with each byte, so it cannot limit the time of a whole connection.
        self._timer = threading.Timer(seconds, self._hang_up)
        self._timer.daemon = True
        self._timer.start()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def version_string(self) -> str:
        return "unbounded-agent"

    def log_message(self, *_: object) -> None:
        """Write no access log: every scrape would add a line."""


class Server(ThreadingMixIn, TCPServer):
    """Serves `site` on a listening socket. The loop replaces `site` by one assignment, without a lock."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, site: Site = NO_PAGES, limits: Limits = LIMITS) -> None:
        BaseServer.__init__(self, listening.getsockname(), Handler)
        self.socket, self.site, self.limits, self.peers = listening, site, limits, Peers(CONNECTIONS)
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL,), name="http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use. The kernel chooses it if the address has port 0."""
        return int(self.socket.getsockname()[1])

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
        """Ignore errors, such as a peer that hangs up."""

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
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
    except UnicodeError as error:
        raise AgentError(
            f"configuration key metrics.address: {address} is not a host: {error}", "configure an address"
        ) from error
    except OSError as error:
        holder, advice = "", "configure one of this host's addresses: `ip -brief address` lists them"
        if error.errno == errno.EADDRINUSE:
            if (user := listening_user(int(port))) is not None:
                holder = f" by a process of user {user}, which answers Prometheus instead"
            advice = (
                f"configure another address or port, or stop the process that holds it: `ss -lntp 'sport = :{port}'`"
            )
        raise AgentError(
            f"configuration key metrics.address: cannot listen on {address}: {error.strerror}{holder}", advice
        ) from error
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


class Endpoint:
    """Servers on the sockets that systemd passed; if it passed none, a server on the configured address.

    systemd listens on its sockets even while the service does not run (systemd.socket(5)), so they are never shut down.
    If another process uses the address, `listen` can be called again later.
    """

    def __init__(self, address: str, inherited: Sequence[socket.socket] = ()) -> None:
        self.error = ""
        """Why the pages are not served; empty if they are."""
        self._address, self._site, self._inherited = address, NO_PAGES, inherited
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
            self._serve(listen_on(self._address))
        except AgentError as error:
            if error.message != self.error:
                log.error("cannot serve metrics and health pages; each pass tries again: %s", one_line(str(error)))
            self.error = error.message

    def move(self, address: str) -> None:
        """Serve on another address. If it cannot be bound, raise AgentError and keep the old one.

        Do nothing if systemd passed sockets.
        """
        if address == self._address or self._inherited:
            return
        try:
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
        self._address = address
        self._serve(listening)

    def _stop(self) -> None:
        while self._servers:
            self._servers.pop().stop()

    def _serve(self, listening: socket.socket) -> None:
        self._servers, self.error = [Server(listening, self._site)], ""
        log.info("serving http://%s/metrics", self._address)
