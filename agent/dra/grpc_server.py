"""A gRPC server on a Unix socket: one thread for all connections, and one for each running call.

h2 implements HTTP/2 (RFC 9113) and HPACK. This module adds what gRPC adds: rules for requests, status codes, message
prefix and trailers (doc/PROTOCOL-HTTP2.md and doc/statuscodes.md of github.com/grpc/grpc). It sends no more
than the client's flow control windows allow. grpcio is not used: the release that Debian and Ubuntu package has open
faults that block a server, holds a thread for each stream, and does not say which process has connected.

A call that waits for the API server must not delay others. A function decides which process may connect: the kubelet. A
client that does something wrong loses its connection; others are not affected. The sockets are in directories to which
pods may have access as hostPath volumes.
"""

import contextlib
import errno
import logging
import math
import os
import selectors
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError

from agent.model.errors import AgentError
from agent.model.text import one_line
from agent.system import opening

log = logging.getLogger(__name__)

PREFIX = 5
"""Bytes before each message: one says whether it is compressed, and four give its length."""
INCOMPLETE_LIMIT = 1 << 17
"""Bytes that may arrive without completing a frame or headers. h2 would keep any number of them, because it checks a
frame's length only when the frame is complete."""

Headers = list[tuple[str, str]]
RESPONSE: Headers = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-accept-encoding", "identity")]


class Code(IntEnum):
    """The status codes with which a call of this server can end."""

    OK = 0
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class RpcError(Exception):
    """The error with which a call ends."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ConnectionLostError(Exception):
    """The connection is no longer usable. Bytes that are still to be sent may tell the client why."""


class Streaming(NamedTuple):
    """A method with a stream of responses: the server sends one at once, and one for each `push`."""

    current: Callable[[], bytes]
    """Returns the response to send now."""


Method = Callable[[bytes], bytes] | Streaming
"""A function from a request to its response may raise RpcError; clients see other exceptions as internal errors."""


def with_prefix(message: bytes) -> bytes:
    """Return a message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def trailers(code: Code, message: str = "") -> Headers:
    """Return the headers that end a call. In the message, `%` and all but printable ASCII are percent-encoded."""
    headers = [("grpc-status", str(int(code)))]
    if message:
        raw = one_line(message).encode(errors="replace")
        encoded = "".join(chr(each) if 0x20 <= each <= 0x7E and each != 0x25 else f"%{each:02X}" for each in raw)
        headers.append(("grpc-message", encoded))
    return headers


class _Http2(H2Connection):
    """h2's connection with lower limits on memory. A kubelet may use one connection, with many calls, for months."""

    DEFAULT_MAX_HEADER_LIST_SIZE = 1 << 14
    MAX_CLOSED_STREAMS = 1 << 10


@dataclass(slots=True, eq=False)
class Call:
    """A call, from its headers until its trailers are sent."""

    method: Method
    body: bytearray = field(default_factory=bytearray)
    """What has arrived of the request; empty again once the request is complete."""
    request: bytes = b""
    complete: bool = False
    """Whether the client has sent the whole request."""
    answered: bool = False
    """Whether the response's headers have been sent."""
    unsent: bytearray = field(default_factory=bytearray)
    """Bytes of the response that the flow control windows have held back."""
    trailers: Headers | None = None
    """Sent after all of `unsent`; None while the call runs."""


Start = Callable[[Any, int, Call], None]
"""Runs a call whose request is complete, given its connection and stream. Raises RpcError if it cannot."""


class Connection:
    """The server's side of a connection."""

    def __init__(self, methods: Mapping[str, Method], start: Start, message_limit: int) -> None:
        self.calls: dict[int, Call] = {}
        """Open calls by HTTP/2 stream."""
        self.greeted = False
        """Whether the client has sent its settings, the first frame of HTTP/2."""
        self._methods, self._start, self._message_limit = methods, start, message_limit
        # Only headers from the client are validated: this module makes the few headers that are sent.
        self._http2 = _Http2(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self._http2.initiate_connection()
        self._incomplete = 0

    @property
    def held(self) -> int:
        """Bytes that are kept of requests, and of responses that the client's windows have held back."""
        return self._incomplete + sum(len(call.body) + len(call.unsent) for call in self.calls.values())

    def receive(self, data: bytes) -> None:
        """Handle bytes from the client. Raises ConnectionLostError."""
        try:
            events = self._http2.receive_data(data)
            self._incomplete = 0 if events else self._incomplete + len(data)
            if self._incomplete > INCOMPLETE_LIMIT:
                raise ConnectionLostError("a frame is too long")
            for event in events:
                self._handle(event)
        except ConnectionLostError:
            raise
        # Catch every exception, not only h2's ProtocolError: a bug must end only this connection.
        except Exception as error:
            raise ConnectionLostError(f"{type(error).__name__}: {error}") from error

    def to_send(self) -> bytes:
        """Return the bytes that have become ready for the client since the last call."""
        return self._http2.data_to_send()

    def send(self, stream: int, message: bytes) -> None:
        """Send a message of a response, unless the call has ended."""
        call = self.calls.get(stream)
        if call and call.trailers is None:
            call.unsent += with_prefix(message)
            self._flush(stream, call)

    def finish(self, stream: int, code: Code, message: str = "") -> None:
        """End a call once all of its response is sent, unless the call has ended already."""
        call = self.calls.get(stream)
        if call and call.trailers is None:
            call.trailers = trailers(code, message)
            self._flush(stream, call)

    def refuse(self, code: Code, message: str) -> None:
        """End all calls, and announce with GOAWAY that no further call is served. Nothing can be sent after that."""
        for stream, call in list(self.calls.items()):
            call.unsent.clear()
            self.finish(stream, code, message)
        with contextlib.suppress(ProtocolError):
            self._http2.close_connection()

    def _handle(self, event: Event) -> None:
        match event:
            case RequestReceived():
                self._open(event)
            case DataReceived():
                self._http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                self._receive_body(event.stream_id, event.data)
            case StreamEnded():
                self._receive_body(event.stream_id, b"", end=True)
            case StreamReset():
                self.calls.pop(event.stream_id, None)
            case RemoteSettingsChanged() | WindowUpdated():
                self.greeted = True
                for stream, call in list(self.calls.items()):
                    self._flush(stream, call)
            case ConnectionTerminated():
                raise ConnectionLostError("the client has ended the connection")
            case _:
                # Other events need no action: for example, acknowledged pings and settings, and priorities.
                pass

    def _open(self, event: RequestReceived) -> None:
        # Neither the HTTP method nor the content type matters: other clients than the kubelet cannot connect. A client
        # that no longer waits resets the stream, so the header `grpc-timeout` is ignored.
        path = next((bytes(value) for name, value in event.headers if name == b":path"), b"").decode(errors="replace")
        method = self._methods.get(path)
        if method is None:
            end = trailers(Code.UNIMPLEMENTED, f"there is no method {path[:200]}")
            self._send_end(event.stream_id, [*RESPONSE, *end])
        else:
            self.calls[event.stream_id] = Call(method)

    def _receive_body(self, stream: int, data: bytes, end: bool = False) -> None:
        """Add a part of a request, and start the call at its end. The body must be exactly one message."""
        call = self.calls.get(stream)
        if call is None or call.trailers is not None:
            return
        call.body += data
        call.complete = end
        try:
            size = int.from_bytes(call.body[1:PREFIX], "big") if len(call.body) >= PREFIX else 0
            if call.body[:1] > b"\0":
                raise RpcError(Code.UNIMPLEMENTED, "compressed messages are not supported")
            if size > self._message_limit:
                raise RpcError(Code.RESOURCE_EXHAUSTED, f"a message has {size} bytes, more than {self._message_limit}")
            if len(call.body) > PREFIX + size or (end and len(call.body) < PREFIX + size):
                raise RpcError(Code.INTERNAL, "the request is not exactly one message")
            if end:
                call.request = bytes(call.body[PREFIX:])
                call.body.clear()
                self._start(self, stream, call)
        except RpcError as error:
            self.finish(stream, error.code, error.message)

    def _flush(self, stream: int, call: Call) -> None:
        """Send as much as the client's windows allow, and the trailers once the response is sent."""
        try:
            if call.unsent and not call.answered:
                self._http2.send_headers(stream, RESPONSE)
                call.answered = True
            while call.unsent:
                size = min(self._http2.local_flow_control_window(stream), self._http2.max_outbound_frame_size)
                if size <= 0:
                    return
                self._http2.send_data(stream, bytes(call.unsent[:size]))
                del call.unsent[:size]
        except ProtocolError:
            self.calls.pop(stream, None)
            return
        if call.trailers is not None:
            self._send_end(stream, call.trailers if call.answered else [*RESPONSE, *call.trailers])

    def _send_end(self, stream: int, headers: Headers) -> None:
        call = self.calls.pop(stream, None)
        # A ProtocolError is no fault here: the client may already have reset the stream, because one read may contain a
        # request and also its reset.
        with contextlib.suppress(ProtocolError):
            self._http2.send_headers(stream, headers, end_stream=True)
            if call is None or not call.complete:
                # Tell the client that it need not send the rest of the request (RFC 9113, section 8.1).
                self._http2.reset_stream(stream, ErrorCodes.NO_ERROR)


DIRECTORY_MODE = 0o700
SOCKET_MODE = 0o600
BACKLOG = 128
"""How many connections may wait to be accepted. Further clients wait or, if non-blocking, get EAGAIN (connect(2))."""
READ = 1 << 16
"""Bytes that are read from a connection at a time."""
LINGER = 0.5
"""Seconds that clients have to hang up after the server has announced that it stops."""
ACCEPT_PAUSE = 0.1
"""Seconds to the next try after a connection could not be accepted, for example for lack of file descriptors."""
REPEAT = 10.0
"""Seconds after which streams get the current response again: that also shows whether their clients still listen."""
REFUSALS_LOGGED = 10.0
"""Seconds from one log message about a connection that was not accepted to the next: anybody can connect often."""

Admit = Callable[[socket.socket], str]
"""Returns why the process that made a connection may not use it; empty if it may. Raises OSError."""


def start_thread(thread: threading.Thread, work: str) -> None:
    """Start a thread. Raises AgentError if that is not possible. `work` completes the sentence "cannot ..."."""
    try:
        thread.start()
    except RuntimeError as error:
        # The unit has as many threads as TasksMax= permits, or there is no memory left.
        advice = "check the limit: `systemctl show --property=TasksCurrent,TasksMax unbounded-agent-dra`"
        raise AgentError(f"cannot {work}: {error}", advice) from error


class ListeningSocket:
    """A socket that listens at a path.

    It replaces a socket that an earlier process left. Whatever else is in its place, or in that of its directories, is
    put aside: renamed, with a dot before its name, because the kubelet connects to every other socket that it sees.
    """

    def __init__(self, base: str, relative: str) -> None:
        """Listen at the path `relative` below the directory `base`. Creates directories that are missing.

        `base` is a directory of the kubelet, and may be a link. Below it, no link is followed. Raises AgentError.
        """
        self.path = f"{base}/{relative}"
        *directories, self._name = relative.split("/")
        try:
            os.makedirs(base, DIRECTORY_MODE, exist_ok=True)
            self._directory = opening.open_probe(base)
            try:
                place = base
                for name in directories:
                    outer, place = self._directory, f"{place}/{name}"
                    self._directory = _open_directory(outer, name, place)
                    os.close(outer)
                self._listen()
            except OSError:
                os.close(self._directory)
                raise
        except OSError as error:
            advice = (
                f"check that {base} is a directory that root can write to, and that nothing in it is a mount point or "
                "immutable (`findmnt`, `lsattr`)"
            )
            if error.errno == errno.EROFS:
                # The unit's sandbox: it names the directories of a kubelet without --root-dir.
                allow = f"ReadWritePaths=-{os.path.dirname(base)}"
                advice = (
                    f"put {allow} into a drop-in of unbounded-agent-dra.service, unless the file system is read-only"
                )
            raise AgentError(f"{self.path}: cannot listen: {error.strerror}", advice) from error

    def _listen(self) -> None:
        # The path leads through the directory's descriptor, because sun_path has room for only 107 bytes.
        place = f"/proc/self/fd/{self._directory}/{self._name}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # The mode is set before `bind`, because the file is made with the mode of the socket (unix_bind in the
            # kernel). So there is no moment at which other users can connect.
            os.fchmod(self.socket.fileno(), SOCKET_MODE)
            if _is_left_over(place):
                os.unlink(self._name, dir_fd=self._directory)
            else:
                _put_aside(self._directory, self._name, self.path)
            self.socket.bind(place)
            self._identity = _identity(self._name, self._directory)
            self.socket.listen(BACKLOG)
        except OSError:
            self.socket.close()
            raise

    @property
    def in_place(self) -> bool:
        """Whether the path still leads to this socket: somebody may have removed or replaced it."""
        with contextlib.suppress(OSError):
            return _identity(self.path) == self._identity
        return False

    def close(self) -> None:
        """Stop listening, and remove the socket's file, unless it now is another socket's."""
        with contextlib.suppress(OSError):
            if _identity(self._name, self._directory) == self._identity:
                os.unlink(self._name, dir_fd=self._directory)
        os.close(self._directory)
        self.socket.close()


def _open_directory(outer: int, name: str, path: str) -> int:
    """Return a descriptor of the directory. Creates it if it is missing, and puts aside what is no directory."""
    place = f"/proc/self/fd/{outer}/{name}"
    for _ in range(2):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, DIRECTORY_MODE, dir_fd=outer)
        descriptor = opening.open_probe(place, follow=False)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        _put_aside(outer, name, path)
    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def _is_left_over(place: str) -> bool:
    """Return whether a file is a socket on which nobody listens."""
    try:
        probe = opening.open_probe(place, follow=False)
    except FileNotFoundError:
        return False
    try:
        if stat.S_ISSOCK(os.fstat(probe).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
                client.connect(f"/proc/self/fd/{probe}")
    except ConnectionRefusedError:
        return True
    except OSError:
        # A socket of another type, or one with a full queue.
        return False
    finally:
        os.close(probe)
    return False


def _put_aside(directory: int, name: str, path: str) -> None:
    """Rename what is in the place of a socket or of its directory, if there is anything. Raises OSError."""
    aside = f".{name}.put-aside-{time.time_ns()}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=directory)
        log.warning("%s is not from this service: renamed to %s; find out who put it there, and remove it", path, aside)


def _identity(path: str, directory: int | None = None) -> tuple[int, int]:
    status = os.lstat(path, dir_fd=directory)
    if not stat.S_ISSOCK(status.st_mode):
        raise OSError(f"{path} is not a socket")
    return status.st_dev, status.st_ino


class Limits(NamedTuple):
    """Limits on clients. Times are in seconds."""

    connections: int = 16
    """With one more, the connection that has been idle for the longest time is closed."""
    calls: int = 32
    """How many calls with one response, of all clients together, may run at a time. Further calls fail with
    RESOURCE_EXHAUSTED."""
    streams: int = 8
    """The same for streams. They may last as long as the connection, and must not keep claims from being prepared."""
    message: int = 1 << 20
    """Bytes of the largest request."""
    memory: int = 15 << 20
    """Bytes of all requests and of all responses that clients have not taken yet. With more, the connection with the
    most of them is closed. Requests of running calls get at most half of it."""
    greeting: float = 5.0
    """How long a client may take to begin HTTP/2."""
    stall: float = 30.0
    """How long a client may read nothing although there are bytes for it."""


class _Peer(Connection):
    """A client's connection, with its socket."""

    def __init__(self, stream: socket.socket, methods: Mapping[str, Method], start: Start, message_limit: int) -> None:
        super().__init__(methods, start, message_limit)
        self.stream = stream
        self.unsent = bytearray()
        self.connected = self.progress = self.active = time.monotonic()
        """`progress`: when the client last read something, or when there was last nothing for it to read. `active`:
        when the client last sent something."""

    @property
    def held(self) -> int:
        return len(self.unsent) + super().held


class Server:
    """Serves gRPC on a Unix socket, as soon as it is created. Connections are used only in the server's thread."""

    def __init__(
        self,
        listener: ListeningSocket,
        methods: Mapping[str, Method],
        admit: Admit,
        limits: Limits,
        changed: Callable[[], None] = lambda: None,
        repeat: float = REPEAT,
    ) -> None:
        """The keys of `methods` are paths, `/package.Service/Method`. The server closes the listener.

        Its thread calls `changed` when `clients` has changed, and when the server ends. Raises AgentError if it cannot
        start.
        """
        self._listener, self._methods, self._admit = listener, methods, admit
        self._limits, self._changed, self._repeat = limits, changed, repeat
        self.peers: set[_Peer] = set()
        self.running: set[Call] = set()
        """Calls whose threads are busy, even if their clients no longer wait. Other threads only remove their own."""
        self._pushed = -math.inf
        """When streams last got the current response, by time.monotonic()."""
        self._posted: deque[tuple[_Peer, Callable[[], None]]] = deque()
        """What other threads want to be done with connections."""
        self._waker, self._woken = socket.socketpair(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.stopping = False
        self._end = math.inf
        """The time.monotonic() at which a stopping server closes its connections, even if calls still run."""
        self._refusal_logged = -math.inf
        self._announced_stop = False
        """Whether the server has announced that it stops. From then on, what clients send is ignored."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener.socket, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(READ))
        self._thread = threading.Thread(target=self._serve, name="grpc", daemon=True)
        try:
            start_thread(self._thread, f"serve {listener.path}")
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
        return sum(peer.greeted for peer in tuple(self.peers))

    def stop(self, grace: float = 2.0) -> None:
        """Stop, and remove the socket. Calls with one response may run on for `grace` seconds."""
        self._end = time.monotonic() + grace
        self.stopping = True
        self._wake()
        self._thread.join(grace + 1)

    def push(self) -> None:
        """Send all streams the current response, unless the client has not yet taken the last one."""
        self._pushed = -math.inf
        self._wake()

    def _serve(self) -> None:
        """Serve until `stop`. After an unexpected error, `healthy` is false."""
        clients = 0
        try:
            while not self.stopping or (self._has_unary_calls and time.monotonic() < self._end):
                for key, _ in self._selector.select(self._pause()):
                    key.data()
                    self._keep_in_memory()
                while self._posted:
                    self._run_guarded(*self._posted.popleft())
                    self._keep_in_memory()
                push = time.monotonic() >= self._pushed + self._repeat
                if push:
                    self._pushed = time.monotonic()
                for peer in tuple(self.peers):
                    self._run_guarded(peer, partial(self._check_and_send, peer, push))
                # What the sockets did not take has only now become part of `unsent`.
                self._keep_in_memory()
                if clients != self.clients:
                    clients = self.clients
                    self._changed()
        finally:
            self._selector.unregister(self._listener.socket)
            self._listener.close()
            self._say_goodbye()
            self._close()
            self._changed()

    @property
    def _has_unary_calls(self) -> bool:
        """Whether a client waits for a call with one response."""
        calls = (call for peer in self.peers for call in peer.calls.values())
        return any(call.complete and not isinstance(call.method, Streaming) for call in calls)

    @property
    def _streams(self) -> list[Call]:
        calls = (call for peer in self.peers for call in peer.calls.values())
        return [call for call in calls if isinstance(call.method, Streaming)]

    def _close(self) -> None:
        for each in (self._selector, self._waker, self._woken):
            each.close()

    def _say_goodbye(self) -> None:
        """Announce to the clients that the server stops, and give them time to read that and to hang up."""
        self._announced_stop = True
        for peer in tuple(self.peers):
            peer.refuse(Code.UNAVAILABLE, "the server is stopping")
            self._run_guarded(peer, partial(self._write, peer))
            with contextlib.suppress(OSError):
                # Do not close the socket yet, only end writing: a client that writes into a closed socket loses what it
                # has not read yet.
                peer.stream.shutdown(socket.SHUT_WR)
        end = time.monotonic() + LINGER
        while self.peers and time.monotonic() < end:
            for key, _ in self._selector.select(max(0.0, end - time.monotonic())):
                key.data()
        for peer in tuple(self.peers):
            self._hang_up(peer)

    def _pause(self) -> float | None:
        """Return the seconds until something is due; None if nothing is."""
        due = [self._end] if self.stopping else []
        due += [self._pushed + self._repeat] if self._streams else []
        for peer in self.peers:
            if peer.unsent:
                due.append(peer.progress + self._limits.stall)
            if not peer.greeted:
                due.append(peer.connected + self._limits.greeting)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _run_guarded(self, peer: _Peer, action: Callable[[], None]) -> None:
        """Run an action for a connection that is still open. If the action fails, close the connection."""
        if peer not in self.peers:
            return
        try:
            action()
        except (ConnectionLostError, OSError) as error:
            log.debug("connection closed: %s", error)
            self._hang_up(peer)
        except Exception:
            log.exception("a connection has failed")
            self._hang_up(peer)

    def _accept(self) -> None:
        try:
            stream = self._listener.socket.accept()[0]
        except OSError as error:
            # The connection still waits to be accepted, so the selector reports it again at once. The pause below keeps
            # this from becoming a busy loop.
            self._log_refusal(f"cannot accept a connection: {error}")
            time.sleep(ACCEPT_PAUSE)
            return
        try:
            refusal = self._admit(stream) or self._make_room()
            if refusal:
                stream.close()
                self._log_refusal(f"refused a connection to {self._listener.path}: {refusal}")
                return
            stream.setblocking(False)
            peer = _Peer(stream, self._methods, self._start, self._limits.message)
            read = partial(self._run_guarded, peer, partial(self._read, peer))
            self._selector.register(stream, selectors.EVENT_READ, read)
            self.peers.add(peer)
        except OSError as error:
            log.debug("connection closed: %s", error)
            stream.close()

    def _log_refusal(self, what: str) -> None:
        if time.monotonic() - self._refusal_logged >= REFUSALS_LOGGED:
            self._refusal_logged = time.monotonic()
            log.warning("%s", what)

    def _make_room(self) -> str:
        """If there is no room for another connection, close the one that has been idle for the longest time.

        Return why there is still no room; empty if there is.
        """
        if len(self.peers) < self._limits.connections:
            return ""
        idle = [peer for peer in self.peers if not peer.calls and not peer.unsent]
        if not idle:
            return f"{len(self.peers)} connections with running calls are open, which is the limit"
        longest = min(idle, key=lambda peer: peer.active)
        longest.refuse(Code.UNAVAILABLE, "another client has connected")
        self._hang_up(longest)
        return ""

    def _keep_in_memory(self) -> None:
        """Close the connection with the most bytes, one after the other, while there are more than the limit."""
        while (
            sum(len(call.request) for call in tuple(self.running)) + sum(peer.held for peer in self.peers)
            > self._limits.memory
        ):
            largest = max(self.peers, key=lambda peer: peer.held, default=None)
            if largest is None or not largest.held:
                return
            where = self._listener.path
            log.warning("closed a connection to %s that held most of %s bytes", where, self._limits.memory)
            self._hang_up(largest)

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
            peer.receive(data)

    def _check_and_send(self, peer: _Peer, push: bool) -> None:
        """Send what is ready, and close the connection if the client is too slow."""
        now = time.monotonic()
        for stream, call in list(peer.calls.items()) if push else ():
            if isinstance(call.method, Streaming) and call.complete and not call.unsent:
                peer.send(stream, call.method.current())
        self._write(peer)
        if not peer.greeted and now >= peer.connected + self._limits.greeting:
            raise ConnectionLostError("the client has not begun HTTP/2")
        if peer.unsent and now >= peer.progress + self._limits.stall:
            raise ConnectionLostError("the client does not read")
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        key = self._selector.get_key(peer.stream)
        if key.events != mask:
            self._selector.modify(peer.stream, mask, key.data)

    def _write(self, peer: _Peer) -> None:
        if not peer.unsent:
            peer.progress = time.monotonic()
        peer.unsent += peer.to_send()
        with contextlib.suppress(BlockingIOError):
            while peer.unsent:
                del peer.unsent[: peer.stream.send(peer.unsent)]
                peer.progress = time.monotonic()

    def _hang_up(self, peer: _Peer) -> None:
        with contextlib.suppress(OSError):
            # HTTP/2's GOAWAY, which tells the client why.
            peer.stream.send(peer.to_send())
        self.peers.discard(peer)
        self._selector.unregister(peer.stream)
        peer.stream.close()
        peer.calls.clear()

    def _start(self, peer: _Peer, stream: int, call: Call) -> None:
        """Run a call in a thread of its own, or begin a stream. Raises RpcError if it cannot.

        If the client no longer waits for a call, the call has ended, but its thread may still be busy. So threads are
        counted.
        """
        if self.stopping:
            raise RpcError(Code.UNAVAILABLE, "the server is stopping")
        if isinstance(call.method, Streaming):
            if len(self._streams) > self._limits.streams:
                raise RpcError(Code.RESOURCE_EXHAUSTED, f"{self._limits.streams} streams are open, which is the limit")
            call.request = b""
            peer.send(stream, call.method.current())
            return
        if len(self.running) >= self._limits.calls:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"{self._limits.calls} calls are running, which is the limit")
        if sum(len(each.request) for each in (call, *self.running)) > self._limits.memory // 2:
            why = f"requests have more than {self._limits.memory // 2} bytes together"
            raise RpcError(Code.RESOURCE_EXHAUSTED, why)
        self.running.add(call)
        run = partial(self._run, peer, stream, call, call.method)
        try:
            threading.Thread(target=run, name="grpc-call", daemon=True).start()
        except RuntimeError as error:
            self.running.discard(call)
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"cannot start a thread: {error}") from error

    def _run(self, peer: _Peer, stream: int, call: Call, handle: Callable[[bytes], bytes]) -> None:
        response, code, message = None, Code.OK, ""
        try:
            response = handle(call.request)
        except RpcError as error:
            code, message = error.code, error.message
        # A bug in a handler must fail only this call. The log has the traceback.
        except Exception as error:
            log.exception("a call has failed")
            code, message = Code.INTERNAL, f"internal error: {type(error).__name__}: {error}"
        finally:
            # Before the response is sent, because the client's next call may follow at once. The client may hold the
            # response back, so the request must not wait in memory for its end.
            self.running.discard(call)
            call.request = b""

        def finish() -> None:
            # The response is sent together with its end: server and client wake up only once.
            if response is not None:
                peer.send(stream, response)
            peer.finish(stream, code, message)

        self._post(peer, finish)

    def _post(self, peer: _Peer, action: Callable[[], None]) -> None:
        self._posted.append((peer, action))
        self._wake()

    def _wake(self) -> None:
        # Both errors are harmless. If the socket's buffer is full, the server's thread is about to wake up anyway. If
        # the socket is closed, the server has ended.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
