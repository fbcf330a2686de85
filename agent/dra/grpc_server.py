"""Serves gRPC on a Unix socket: one thread for all connections, and one for each running call.

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
from functools import partial
from typing import NamedTuple

from agent.dra.grpc import Call, Code, Connection, ConnectionLostError, Method, RpcError, Start, Streaming
from agent.model.errors import AgentError
from agent.system import opening

log = logging.getLogger(__name__)

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
"""Seconds from one log message about a refused connection to the next: anybody can connect often."""

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
            raise AgentError(
                f"{self.path}: cannot listen: {error.strerror}",
                f"check that {base} is a directory that root can write to, and that nothing in it is a mount point or "
                "immutable (`findmnt`, `lsattr`)",
            ) from error

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
    """Return device and inode of a socket's file. Raises OSError."""
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
        self._not_accepted = ""
        """Why the last connection could not be accepted; empty if it was."""
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
            if str(error) != self._not_accepted:
                log.warning("cannot accept a connection: %s", error)
            self._not_accepted = str(error)
            time.sleep(ACCEPT_PAUSE)
            return
        self._not_accepted = ""
        try:
            refusal = self._admit(stream) or self._make_room()
            if refusal:
                stream.close()
                if time.monotonic() - self._refusal_logged >= REFUSALS_LOGGED:
                    self._refusal_logged = time.monotonic()
                    log.warning("refused a connection to %s: %s", self._listener.path, refusal)
                return
            stream.setblocking(False)
            peer = _Peer(stream, self._methods, self._start, self._limits.message)
            read = partial(self._run_guarded, peer, partial(self._read, peer))
            self._selector.register(stream, selectors.EVENT_READ, read)
            self.peers.add(peer)
        except OSError as error:
            log.debug("connection closed: %s", error)
            stream.close()

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
            log.warning(
                "closed a connection to %s: requests and responses together have more than %s bytes, and most are "
                "this connection's",
                self._listener.path,
                self._limits.memory,
            )
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
        """Send as much as the client takes."""
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
        """Run a call, in its thread."""
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
