"""Serves gRPC on a Unix socket: one thread for all connections, and one for each running call.

A function decides which process may connect: the kubelet. A client that does something wrong loses its connection;
others are not affected.
"""

import contextlib
import logging
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent.dra.grpc_calls import Calls
from agent.dra.grpc_connection import Connection, ConnectionLostError
from agent.dra.grpc_wire import Code, Method
from agent.dra.threads import start
from agent.dra.unix_socket import ListeningSocket
from agent.model.errors import AgentError

log = logging.getLogger(__name__)

READ = 1 << 16
"""Bytes that are read from a connection at a time."""
LINGER = 0.5
"""Seconds that clients have to hang up after the server has announced that it stops."""
LONGEST_WAIT = 3600.0
"""Seconds of the longest wait for events. Clients may set time limits too long for a system call (10 000 years)."""
ACCEPT_PAUSE = 0.1
"""Seconds to the next try after a connection could not be accepted, for example for lack of file descriptors."""
REFUSALS_LOGGED = 10.0
"""Seconds from one log message about a refused connection to the next: anybody can connect often."""

Admit = Callable[[socket.socket], str]
"""Returns why the process that made a connection may not use it; empty if it may. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on clients. Times are in seconds."""

    connections: int = 16
    """With one more, the connection that has been idle for the longest time is closed."""
    calls: int = 32
    """How many calls with one response, of all clients together, may run at a time. Further calls fail with
    RESOURCE_EXHAUSTED."""
    streams: int = 8
    """The same for calls with several responses, which may last as long as the connection."""
    message: int = 1 << 20
    """Bytes of the largest request."""
    memory: int = 15 << 20
    """Bytes of all requests and of all responses that clients have not taken yet. With more, the connection with the
    most of them is closed. Requests of running calls get at most half of it."""
    greeting: float = 5.0
    """How long a client may take to begin HTTP/2."""
    stall: float = 30.0
    """How long a client may read nothing although there are bytes for it."""


class _Peer:
    """A client's connection."""

    def __init__(self, stream: socket.socket, connection: Connection, now: float) -> None:
        self.stream, self.connection = stream, connection
        self.unsent = bytearray()
        self.connected = self.progress = self.active = now
        """Times by time.monotonic(). `connected`: when the client connected. `progress`: when the client last read
        something, or when there was last nothing for it to read. `active`: when the client last sent something."""

    @property
    def idle(self) -> bool:
        """Whether no call runs, and nothing waits for the client."""
        return not self.connection.calls and not self.unsent

    @property
    def held(self) -> int:
        """Bytes that are kept for the client."""
        return len(self.unsent) + self.connection.held


class Server:
    """Serves gRPC on a Unix socket, as soon as it is created."""

    def __init__(
        self, listener: ListeningSocket, methods: Mapping[str, Method], admit: Admit, limits: Limits = Limits()
    ) -> None:
        """The keys of `methods` are paths, `/package.Service/Method`. The server closes the listener.

        Raises AgentError if it cannot start.
        """
        self._methods, self._admit, self._limits = methods, admit, limits
        self._listener = listener
        self._calls = Calls(limits.calls, limits.streams, limits.memory // 2, self._post)
        self._peers: dict[Connection, _Peer] = {}
        self._posted: deque[tuple[Connection, Callable[[], None]]] = deque()
        self._waker, self._woken = socket.socketpair(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._end = math.inf
        """The time.monotonic() at which a stopping server closes its connections, even if calls still run."""
        self._not_accepted = ""
        """Why the last connection could not be accepted; empty if it was."""
        self._refusal_logged = -math.inf
        """When the last refused connection was logged, by time.monotonic()."""
        self._announced_stop = False
        """Whether the server has announced that it stops. From then on, what clients send is ignored."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener.socket, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(READ))
        self._thread = threading.Thread(target=self._serve, name="grpc", daemon=True)
        try:
            start(self._thread, f"serve {listener.path}")
        except AgentError:
            self._listener.close()
            self._close()
            raise

    @property
    def healthy(self) -> bool:
        """Whether clients can connect: the server runs, and its path still leads to its socket."""
        return self._thread.is_alive() and self._listener.in_place

    @property
    def clients(self) -> int:
        """How many clients are connected and have begun HTTP/2."""
        return sum(connection.greeted for connection in tuple(self._peers))

    def stop(self, grace: float = 2.0) -> None:
        """Stop, and remove the socket. Calls with one response may run on for `grace` seconds."""
        self._end = time.monotonic() + grace
        self._calls.stopping = True
        self._wake()
        self._thread.join(grace + 1)

    def _serve(self) -> None:
        """Serve until `stop`. After an unexpected error, `healthy` is false."""
        try:
            while not self._calls.stopping or (self._calls.unary_running and time.monotonic() < self._end):
                for key, _ in self._selector.select(self._pause()):
                    key.data()
                    self._keep_in_memory()
                while self._posted:
                    self._run_guarded(*self._posted.popleft())
                    self._keep_in_memory()
                for connection, peer in tuple(self._peers.items()):
                    self._run_guarded(connection, lambda peer=peer: self._check_and_send(peer))  # type: ignore[misc]
        finally:
            self._selector.unregister(self._listener.socket)
            self._listener.close()
            self._say_goodbye()
            self._calls.end()
            self._close()

    def _close(self) -> None:
        for each in (self._selector, self._waker, self._woken):
            each.close()

    def _say_goodbye(self) -> None:
        """Announce to the clients that the server stops, and give them time to read that and to hang up."""
        self._announced_stop = True
        for connection, peer in tuple(self._peers.items()):
            connection.refuse(Code.UNAVAILABLE, "the server is stopping")
            self._run_guarded(connection, lambda peer=peer: self._write(peer))  # type: ignore[misc]
            with contextlib.suppress(OSError):
                # Do not close the socket yet, only end writing: a client that writes into a closed socket loses what it
                # has not read yet.
                peer.stream.shutdown(socket.SHUT_WR)
        end = time.monotonic() + LINGER
        while self._peers and time.monotonic() < end:
            for key, _ in self._selector.select(max(0.0, end - time.monotonic())):
                key.data()
        for connection in tuple(self._peers):
            self._hang_up(connection)

    def _pause(self) -> float | None:
        """Return the seconds until the next deadline or limit, at most LONGEST_WAIT; None if there is none."""
        due = [self._end] if self._calls.stopping else []
        for peer in self._peers.values():
            due += [call.deadline for call in peer.connection.calls.values() if call.deadline is not None]
            if peer.unsent:
                due.append(peer.progress + self._limits.stall)
            if not peer.connection.greeted:
                due.append(peer.connected + self._limits.greeting)
        return min(LONGEST_WAIT, max(0.0, min(due) - time.monotonic())) if due else None

    def _run_guarded(self, connection: Connection, action: Callable[[], None]) -> None:
        """Run an action for a connection that is still open. If the action fails, close the connection."""
        if connection not in self._peers:
            return
        try:
            action()
        except (ConnectionLostError, OSError) as error:
            log.debug("connection closed: %s", error)
            with contextlib.suppress(OSError):
                # HTTP/2's GOAWAY, which tells the client what it did wrong.
                self._peers[connection].stream.send(connection.to_send())
            self._hang_up(connection)
        except Exception:
            log.exception("a connection has failed")
            self._hang_up(connection)

    def _accept(self) -> None:
        try:
            stream = self._listener.socket.accept()[0]
        except OSError as error:
            # The connection still waits to be accepted, so the selector reports it again at once. The pause below keeps
            # this from becoming a busy loop.
            if str(error) != self._not_accepted:
                log.warning("cannot accept a connection: %s", error)
            self._not_accepted = str(error)
            time.sleep(ACCEPT_PAUSE)
            return
        self._not_accepted = ""
        try:
            refusal = self._admit(stream) or self._make_room()
            if refusal:
                self._log_refusal(refusal)
                stream.close()
                return
            stream.setblocking(False)
            connection = Connection(self._methods, self._calls, self._limits.message)
            peer = _Peer(stream, connection, time.monotonic())
            self._selector.register(
                stream, selectors.EVENT_READ, lambda: self._run_guarded(connection, lambda: self._read(peer))
            )
            self._peers[connection] = peer
        except OSError as error:
            log.debug("connection closed: %s", error)
            stream.close()

    def _make_room(self) -> str:
        """If there is no room for another connection, close the one that has been idle for the longest time.

        Return why there is still no room; empty if there is.
        """
        if len(self._peers) < self._limits.connections:
            return ""
        idle = [peer for peer in self._peers.values() if peer.idle]
        if not idle:
            return f"{len(self._peers)} connections with running calls are open, which is the limit"
        longest = min(idle, key=lambda peer: peer.active).connection
        longest.refuse(Code.UNAVAILABLE, "another client has connected")
        self._run_guarded(longest, lambda: self._close_connection("it was idle, and another client has connected"))
        return ""

    def _close_connection(self, why: str) -> None:
        raise ConnectionLostError(why)

    def _log_refusal(self, refusal: str) -> None:
        now = time.monotonic()
        if now - self._refusal_logged >= REFUSALS_LOGGED:
            self._refusal_logged = now
            log.warning("refused a connection to %s: %s", self._listener.path, refusal)

    def _keep_in_memory(self) -> None:
        """Close the connection with the most bytes, one after the other, while there are more than the limit."""
        while self._calls.held + sum(peer.held for peer in self._peers.values()) > self._limits.memory:
            largest = max(self._peers.values(), key=lambda peer: peer.held, default=None)
            if largest is None or not largest.held:
                return
            log.warning(
                "closed a connection to %s: requests and responses together have more than %s bytes, and most are "
                "this connection's",
                self._listener.path,
                self._limits.memory,
            )
            self._hang_up(largest.connection)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.stream.recv(READ)
        except BlockingIOError:
            # The selector reported the socket because it is ready for writing; there is nothing to read.
            return
        if not data:
            raise ConnectionLostError("the client has hung up")
        peer.active = time.monotonic()
        if not self._announced_stop:
            peer.connection.receive(data, peer.active)

    def _check_and_send(self, peer: _Peer) -> None:
        """End expired calls, send what is ready, and close the connection if the client is too slow."""
        now = time.monotonic()
        peer.connection.expire(now)
        self._write(peer)
        if not peer.connection.greeted and now >= peer.connected + self._limits.greeting:
            raise ConnectionLostError("the client has not begun HTTP/2")
        if peer.unsent and now >= peer.progress + self._limits.stall:
            raise ConnectionLostError("the client does not read")
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        key = self._selector.get_key(peer.stream)
        if key.events != mask:
            self._selector.modify(peer.stream, mask, key.data)

    def _write(self, peer: _Peer) -> None:
        """Send as much as the client takes."""
        if not peer.unsent:
            peer.progress = time.monotonic()
        peer.unsent += peer.connection.to_send()
        with contextlib.suppress(BlockingIOError):
            while peer.unsent:
                del peer.unsent[: peer.stream.send(peer.unsent)]
                peer.progress = time.monotonic()

    def _hang_up(self, connection: Connection) -> None:
        peer = self._peers.pop(connection, None)
        if peer:
            self._selector.unregister(peer.stream)
            peer.stream.close()
            connection.drop_all_calls()

    def _post(self, connection: Connection, action: Callable[[], None]) -> None:
        self._posted.append((connection, action))
        self._wake()

    def _wake(self) -> None:
        # Both errors are harmless. If the socket's buffer is full, the server's thread is about to wake up anyway. If
        # the socket is closed, the server has ended.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
