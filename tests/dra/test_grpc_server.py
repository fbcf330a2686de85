"""The gRPC server with a client of another make: grpcio, which is not what it is written with."""

import errno
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from agent.dra.grpc_server import Code, Limits, Method, RpcError, Server, Streaming
from agent.model.errors import AgentError
from tests.fakes.grpc_serving import LONG, Serving
from tests.fakes.umask import umask
from tests.fakes.waiting import wait_for


class Example:
    """Methods of an example service."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.news = b"1"
        """What streams get."""

    @property
    def methods(self) -> dict[str, Method]:
        return {
            "/test.Example/Echo": bytes,
            "/test.Example/Refuse": self.refuse,
            "/test.Example/Break": lambda request: request[len(request) : 1 // 0],
            "/test.Example/Wait": lambda request: request if self.go_on.wait(LONG) else b"",
            "/test.Example/Watch": Streaming(lambda: self.news),
        }

    def refuse(self, request: bytes) -> bytes:
        raise RpcError(Code.RESOURCE_EXHAUSTED, "not 100 % good: Größe\n" + request.decode())


@pytest.fixture
def example() -> Iterator[Example]:
    found = Example()
    yield found
    found.go_on.set()


@pytest.fixture
def path() -> Iterator[str]:
    # Not tmp_path, which is longer than sun_path (107 bytes). grpcio cannot use such a path.
    with tempfile.TemporaryDirectory() as directory:
        yield f"{directory}/test.sock"


@pytest.fixture
def server(path: str, example: Example) -> Iterator[Server]:
    running = Serving(path, example.methods)
    yield running
    running.stop(0.1)


@pytest.fixture
def channel(server: Server, path: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"unix:{path}") as opened:
        yield opened


def call(channel: grpc.Channel, method: str, request: bytes = b"", timeout: float = LONG) -> bytes:
    answer: bytes = channel.unary_unary(f"/test.Example/{method}")(request, timeout=timeout)
    return answer


def error(
    channel: grpc.Channel, method: str, request: bytes = b"", timeout: float = LONG
) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, method, request, timeout)
    failed = caught.value
    assert isinstance(failed, grpc.Call)
    return failed.code(), failed.details() or ""


@pytest.mark.parametrize("request_", [b"", b"x", bytes(range(256)) * 300, b"x" * (1 << 20)])
def test_unary_calls(channel: grpc.Channel, request_: bytes) -> None:
    """Of sizes below and above HTTP/2's frames and flow control windows."""
    assert call(channel, "Echo", request_) == request_


def test_calls_run_at_the_same_time(channel: grpc.Channel, example: Example) -> None:
    """Also on the same connection: a claim that waits delays no other."""
    waiting = [channel.unary_unary("/test.Example/Wait").future(b"%d" % number, timeout=LONG) for number in range(20)]
    for number in range(100):
        assert call(channel, "Echo", b"%d" % number) == b"%d" % number
    assert not any(each.done() for each in waiting)
    example.go_on.set()
    assert [each.result() for each in waiting] == [b"%d" % number for number in range(20)]


def test_calls_and_streams_have_limits_of_their_own(path: str, example: Example) -> None:
    """A client may open streams and leave them open; claims must still be prepared."""
    server = Serving(path, example.methods, Limits(streams=2, calls=2))
    with grpc.insecure_channel(f"unix:{path}") as channel:
        open_stream = channel.unary_stream("/test.Example/Watch")
        streams = [open_stream(b"", timeout=LONG) for _ in range(2)]
        assert [next(each) for each in streams] == [b"1"] * 2
        with pytest.raises(grpc.RpcError) as caught:
            next(open_stream(b"", timeout=LONG))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert call(channel, "Echo", b"x") == b"x"
        waiting = [channel.unary_unary("/test.Example/Wait").future(b"", timeout=LONG) for _ in range(2)]
        wait_for(lambda: len(server.running) == 2)
        assert error(channel, "Echo")[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        example.go_on.set()
        assert [each.result() for each in waiting] == [b"", b""]
        assert call(channel, "Echo", b"x") == b"x"
        streams[0].cancel()
        wait_for(lambda: sum(len(peer.calls) for peer in server.peers) == 1)
        assert next(open_stream(b"", timeout=LONG)) == b"1"
    server.stop()


def test_errors(channel: grpc.Channel, path: str, caplog: pytest.LogCaptureFixture) -> None:
    assert error(channel, "Refuse", b"x") == (grpc.StatusCode.RESOURCE_EXHAUSTED, "not 100 % good: Größe x")
    code, details = error(channel, "Nothing")
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "/test.Example/Nothing" in details
    broken = "internal error: ZeroDivisionError: integer division or modulo by zero"
    assert error(channel, "Break", b"x") == (grpc.StatusCode.INTERNAL, broken)
    assert "a call has failed" in caplog.text
    long = "a message has 1048577 bytes, more than 1048576"
    assert error(channel, "Echo", b"x" * ((1 << 20) + 1)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, long)
    with grpc.insecure_channel(f"unix:{path}", compression=grpc.Compression.Gzip) as compressing:
        refusal = (grpc.StatusCode.UNIMPLEMENTED, "compressed messages are not supported")
        assert error(compressing, "Echo", b"x" * 10_000) == refusal
    assert call(channel, "Echo", b"x") == b"x"


def test_streams(channel: grpc.Channel, server: Server, example: Example) -> None:
    """Each gets the current response at once, and again after each `push`."""
    streams = [channel.unary_stream("/test.Example/Watch")(b"", timeout=LONG) for _ in range(2)]
    for news in (b"1", b"2", b"3" * 100_000):
        example.news = news
        server.push()
        assert [next(each for each in stream if each == news) for stream in streams] == [news] * 2
    for each in streams:
        each.cancel()
    wait_for(lambda: not any(peer.calls for peer in server.peers))


def test_a_stream_waits_for_a_client_that_does_not_read(
    channel: grpc.Channel, server: Server, example: Example
) -> None:
    """What is made and not read is bounded, and other calls go on."""
    example.news = b"x" * 1_000_000
    stream = channel.unary_stream("/test.Example/Watch")(b"", timeout=LONG)
    assert len(next(stream)) == 1_000_000
    for _ in range(20):
        server.push()
        assert call(channel, "Echo", b"x") == b"x"
    assert sum(peer.held for peer in server.peers) < 4_000_000


def test_a_stopped_server_waits_for_a_while(channel: grpc.Channel, server: Server, example: Example) -> None:
    waiting = channel.unary_unary("/test.Example/Wait").future(b"x", timeout=LONG)
    wait_for(lambda: server.running)
    server.stop(0.1)
    assert waiting.code() is grpc.StatusCode.UNAVAILABLE


def test_stopping_lets_calls_end_and_removes_the_socket(
    channel: grpc.Channel, server: Server, path: str, example: Example
) -> None:
    assert os.path.exists(path)
    waiting = channel.unary_unary("/test.Example/Wait").future(b"x", timeout=LONG)
    watching = channel.unary_stream("/test.Example/Watch")(b"", timeout=LONG)
    assert next(watching) == b"1"
    wait_for(lambda: server.running)
    stopping = threading.Thread(target=server.stop, args=(LONG,))
    stopping.start()
    wait_for(lambda: server.stopping)
    example.go_on.set()
    assert waiting.result() == b"x"
    with pytest.raises(grpc.RpcError) as caught:
        list(watching)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    stopping.join(LONG)
    assert not os.path.exists(path)
    assert not server.healthy
    assert error(channel, "Echo", timeout=1)[0] is grpc.StatusCode.UNAVAILABLE


def test_a_new_server_replaces_a_stale_socket(path: str, example: Example) -> None:
    """As after kill -9; a client connects again by itself."""
    first = Serving(path, example.methods)
    with grpc.insecure_channel(f"unix:{path}") as channel:
        assert call(channel, "Echo", b"1") == b"1"
        second = Serving(path, example.methods)
        assert not first.healthy
        first.stop()
        assert second.healthy, "the first one has removed the second one's socket"
        wait_for(lambda: channel.unary_unary("/test.Example/Echo")(b"2", timeout=LONG, wait_for_ready=True) == b"2")
    second.stop()


def test_sockets_are_for_root_only(tmp_path: Path) -> None:
    """Whatever the umask. The path may be longer than sun_path."""
    path = tmp_path / ("long" * 30) / "test.sock"
    with umask(0):
        server = Serving(str(path), {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    server.stop()
    assert not path.exists()
    path.parent.rmdir()
    path.parent.touch()
    with pytest.raises(AgentError, match=r"cannot listen: .*check that .* is a directory"):
        Serving(str(path), {})


def test_the_units_sandbox_forbids_another_root_directory_of_the_kubelet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice about directories, mounts and attributes did not help."""

    def mkdir(path: str, mode: int = 0o777, dir_fd: int | None = None) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(AgentError, match=rf"Read-only file system .*ReadWritePaths=-{tmp_path}/kubelet into a drop-in"):
        Serving(f"{tmp_path}/kubelet/plugins/test.sock", {})


def test_a_server_without_a_thread_is_an_error_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit's limit of tasks may be reached (TasksMax=). Nothing stays behind."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(AgentError, match=r"cannot serve .*test.sock: can't start new thread .*TasksMax"):
        Serving(f"{tmp_path}/test.sock", {})
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)
