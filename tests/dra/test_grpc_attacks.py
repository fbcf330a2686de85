"""What clients do wrong costs their own connection: the server goes on, and forgets them."""

import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import Event, ResponseReceived
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from agent.dra.grpc_server import Call, Code, Connection, ConnectionLostError, Limits, RpcError, with_prefix
from tests.fakes import grpc_process
from tests.fakes.grpc_process import ECHO
from tests.fakes.grpc_serving import HELD, LIMITS, LONG, METHODS, Serving, asking, connected, memory, serving
from tests.fakes.waiting import wait_for


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(LIMITS) as running:
        yield running


REPOSITORY = Path(__file__).resolve().parents[2]


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""How HTTP/2 begins (RFC 9113 section 3.4)."""


@pytest.fixture(autouse=True)
def still_serves(server: Serving) -> Iterator[None]:
    """Check after each test that the server has no connection left, and still serves new clients."""
    yield
    wait_for(lambda: not server.peers, LONG)
    with grpc.insecure_channel(f"unix:{server.path}") as channel:
        assert channel.unary_unary(ECHO)(b"x", timeout=LONG) == b"x"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return an HTTP/2 frame (RFC 9113 section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


DATA, HEADERS, RESET, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
BEGIN = PREFACE + frame(SETTINGS, 0, 0)


def read_all(client: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            found += part
    return found


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        os.urandom(4096),
        PREFACE + frame(DATA, 0, 1, b"x"),
        BEGIN + frame(DATA, 0, 1, b"x"),
        BEGIN + frame(HEADERS, 4, 1, b"\xff" * 50),
        BEGIN + frame(HEADERS, 4, 2, b"\x82"),
        BEGIN + frame(CONTINUATION, 4, 1, b"\x82"),
        BEGIN + frame(HEADERS, 0, 1, b"\x82") + frame(CONTINUATION, 0, 1, b"\x82") * 100,
        BEGIN + frame(DATA, 8, 1, b"\xff"),
        BEGIN + b"\xff\xff\xff" + frame(DATA, 0, 1)[3:] + bytes(3 << 20),
        BEGIN + frame(SETTINGS, 0, 0, b"12345"),
        BEGIN + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0xFFFFFFFF)),
        BEGIN + frame(8, 0, 0, struct.pack(">I", 0)),
    ],
    ids=lambda sent: f"{len(sent)}",
)
def test_what_is_not_http2_ends_the_connection(server: Serving, sent: bytes) -> None:
    with connected(server) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(sent)
        read_all(client)


def test_a_header_bomb_ends_the_connection(server: Serving) -> None:
    """A few bytes that become megabytes: an entry of HPACK's table, repeated (CVE-2016-6581)."""
    literal = b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000
    with connected(server) as client:
        client.sendall(BEGIN + frame(HEADERS, 4, 1, literal + b"\xbe" * 10_000))
        found = read_all(client)
    goaway = frame(7, 0, 0, struct.pack(">II", 0, ErrorCodes.ENHANCE_YOUR_CALM))
    assert goaway[3:9] in found, "no GOAWAY"
    assert found.partition(goaway[3:9])[2][4:8] == goaway[13:17], "refused for another reason"


def test_a_silent_client_is_sent_away(server: Serving) -> None:
    with connected(server) as client:
        assert read_all(client).startswith(b"\x00\x00"), "settings, then the end"
    with connected(server) as client:
        client.sendall(PREFACE[:10])
        read_all(client)


def test_the_connection_that_was_idle_longest_makes_room(caplog: pytest.LogCaptureFixture) -> None:
    """Clients that connect and do nothing lock nobody out, and no running call is ended."""
    with contextlib.ExitStack() as stack:
        # Otherwise a busy server sends the first clients away, which do not greet it, before it sees the last ones.
        server = stack.enter_context(serving(LIMITS._replace(greeting=LONG)))
        clients = [stack.enter_context(connected(server)) for _ in range(LIMITS.connections)]
        clients[0].sendall(asking("/test.Example/Slow")[1])
        wait_for(lambda: any(connection.calls for connection in server.peers), LONG)
        with grpc.insecure_channel(f"unix:{server.path}") as channel:
            assert channel.unary_unary(ECHO)(b"x", timeout=LONG) == b"x"
            read_all(clients[1])
            for each in (clients[0], *clients[2:]):
                each.setblocking(False)
                assert each.recv(1), "it was not closed"
            for each in clients[2:]:
                each.settimeout(LONG)
                each.sendall(asking("/test.Example/Slow")[1])
            wait_for(lambda: sum(bool(each.calls) for each in server.peers) == LIMITS.connections - 1, LONG)
            busy = channel.unary_unary("/test.Example/Hold").future(b"x", timeout=LONG)
            wait_for(lambda: all(each.calls for each in server.peers), LONG)
            with connected(server) as refused:
                assert read_all(refused) == b""
            HELD.set()
            assert busy.result() == b"x"
    assert f"{LIMITS.connections} connections with running calls are open, which is the limit" in caplog.text


def test_a_connection_that_cannot_be_accepted_is_logged_once(
    server: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It still waits, and is tried again ten times a second."""
    attempts: list[socket.socket] = []

    def accept(self: socket.socket) -> None:
        attempts.append(self)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", accept)
            stack.enter_context(connected(server))
            wait_for(lambda: len(attempts) >= 3)
        wait_for(lambda: server.peers)
    assert caplog.text.count("cannot accept a connection: [Errno 24] Too many open files") == 1


@pytest.mark.parametrize(
    "limits", [LIMITS._replace(memory=1 << 30), LIMITS._replace(stall=LONG, memory=4 << 20)], ids=["time", "size"]
)
def test_a_client_that_never_reads_is_sent_away(limits: Limits, caplog: pytest.LogCaptureFixture) -> None:
    """It reads nothing for too long, or too much waits for it: each is enough."""
    http2, request = asking("/test.Example/Fill", 1)
    http2.increment_flow_control_window((1 << 31) - (1 << 17))
    with serving(limits._replace(greeting=LONG)) as server, connected(server) as client:
        client.sendall(request + frame(8, 0, 1, struct.pack(">I", 1 << 30)) + http2.data_to_send())
        assert client.recv(1), "the server knows the client"
        wait_for(lambda: not server.peers, LONG)
    for record in caplog.records:
        assert f"a connection to {server.path} that held most" in record.message


def test_calls_that_are_reset_at_once_leave_nothing(server: Serving) -> None:
    """CVE-2023-44487."""
    before = threading.active_count()
    http2 = H2Connection(H2Configuration(client_side=True))
    http2.initiate_connection()
    sent = [http2.data_to_send()]
    headers = [(":method", "POST"), (":scheme", "http"), (":path", ECHO), (":authority", "x")]
    for number in range(1, 2401, 2):
        http2.send_headers(number, [*headers, ("content-type", "application/grpc")])
        http2.send_data(number, with_prefix(b"x"), end_stream=True)
        http2.reset_stream(number)
        sent.append(http2.data_to_send())
    with connected(server) as client:
        client.sendall(b"".join(sent) + frame(PING, 0, 0, b"12345678"))
        found = b""
        while b"12345678" not in found:
            found += client.recv(65536)
        assert all(not connection.calls for connection in server.peers)
    wait_for(lambda: threading.active_count() <= before + Limits().calls, LONG)


def refuse(connection: Connection, stream: int, call: Call) -> None:
    raise RpcError(Code.UNAVAILABLE, "not now")


@given(
    some.lists(some.tuples(some.integers(0, 12), some.integers(0, 255), some.integers(0, 7), some.binary(max_size=60)))
)
def test_any_frames_are_handled_or_end_the_connection(frames: list[tuple[int, int, int, bytes]]) -> None:
    connection = Connection(METHODS, refuse, 100)
    with contextlib.suppress(ConnectionLostError):
        connection.receive(BEGIN)
        for each in frames:
            connection.receive(frame(*each))
    connection.to_send()


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(some.data())
def test_damaged_requests_are_handled_or_end_the_connection(data: some.DataObject) -> None:
    """A request with a few bytes changed goes deeper than random frames do."""
    damaged = bytearray(asking(ECHO, 20)[1])
    for _ in range(data.draw(some.integers(1, 4))):
        damaged[data.draw(some.integers(len(PREFACE), len(damaged) - 1))] = data.draw(some.integers(0, 255))
    connection = Connection(METHODS, refuse, 100)
    with contextlib.suppress(ConnectionLostError):
        for start in range(0, len(damaged), 7):
            connection.receive(bytes(damaged[start : start + 7]))
    connection.to_send()


class Flood:
    """A client that uses HTTP/2 as no kubelet does: it sends what it likes, and reads only what it must."""

    def __init__(self, path: str, window: int) -> None:
        """`window` is how many bytes the server may send of each response."""
        self._stream = socket.socket(socket.AF_UNIX)
        self._stream.settimeout(LONG)
        self._stream.connect(path)
        self._http2 = H2Connection(H2Configuration(client_side=True))
        self._http2.local_settings = Settings(client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window})
        self._http2.initiate_connection()
        self._stream.sendall(self._http2.data_to_send())

    def call(self, number: int, method: str, body: bytes, end: bool) -> None:
        """Send a request, and wait for the headers of its response; without `end`, a part of it is missing.

        Raises OSError if the server has closed the connection.
        """
        headers = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "x")]
        self._http2.send_headers(number, [*headers, ("content-type", "application/grpc")])
        rest = memoryview(body if end else body[:-5])
        while rest:
            size = min(self._http2.local_flow_control_window(number), 16384, len(rest))
            if size:
                self._http2.send_data(number, rest[:size].tobytes(), end_stream=end and size == len(rest))
                rest = rest[size:]
            self._stream.sendall(self._http2.data_to_send())
            if not size:
                self._receive()
        while end and not any(
            isinstance(each, ResponseReceived) and each.stream_id == number for each in self._receive()
        ):
            pass

    def _receive(self) -> list[Event]:
        """Handle some bytes of the server."""
        if not (received := self._stream.recv(65536)):
            raise ConnectionResetError
        return self._http2.receive_data(received)

    def close(self) -> None:
        self._stream.close()


PEAK = 48_000
"""KiB that a server may use more than at its start: 15 MiB of what clients send or do not take, which Python may keep
twice for a moment, and its own."""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("method", "size", "window", "end"),
    [
        (ECHO, grpc_process.SIZE, 65535, False),
        # Nothing of a response can be sent: it is kept, and perhaps its request.
        (grpc_process.BIG, 1, 0, True),
        (grpc_process.SMALL, grpc_process.SIZE, 0, True),
    ],
    ids=["unfinished requests", "big responses that nobody takes", "small responses that nobody takes"],
)
def test_what_clients_leave_behind_takes_little_memory(method: str, size: int, window: int, end: bool) -> None:
    """64 MiB of requests or responses. The server, in a process of its own, still serves afterwards."""
    flooded = 0
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/test.sock"
        argv = [sys.executable, "-m", grpc_process.__name__, path]
        with subprocess.Popen(argv, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout
            assert process.stdout.readline() == b"serving\n"
            before = memory(process.pid, "VmRSS")
            with contextlib.ExitStack() as stack:
                for _ in range(4):
                    flood = stack.enter_context(contextlib.closing(Flood(path, window)))
                    with contextlib.suppress(OSError, ProtocolError):
                        for stream in range(1, 33, 2):
                            flood.call(stream, method, with_prefix(bytes(size)), end)
                            flooded += grpc_process.SIZE
            with grpc.insecure_channel(f"unix:{path}") as channel:
                assert channel.unary_unary(ECHO)(b"x", timeout=LONG) == b"x"
            assert memory(process.pid, "VmHWM") - before < PEAK
    assert flooded > 2 * Limits().memory, "too little to prove anything"
