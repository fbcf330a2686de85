"""The gRPC server with a client of another make: grpcio, which is not what it is written with."""

import tempfile
import threading
from collections.abc import Iterator

import grpc
import pytest

from agent.dra.grpc_server import Server, serve
from agent.dra.grpc_wire import Code, RpcError, Service, Streaming, Unary

LONG = 30.0
"""Seconds that nothing here takes."""


class Example:
    """Methods of an example service."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.closed = threading.Event()

    @property
    def services(self) -> dict[str, Service]:
        return {
            "/test.Example/Echo": Unary(lambda request: request),
            "/test.Example/Refuse": Unary(self.refuse),
            "/test.Example/Break": Unary(lambda request: request[len(request) : 1 // 0]),
            "/test.Example/Wait": Unary(self.wait),
            "/test.Example/Count": Streaming(self.count),
            "/test.Example/Forever": Streaming(self.forever),
        }

    def refuse(self, request: bytes) -> bytes:
        raise RpcError(Code.INVALID_ARGUMENT, "not 100 % good: Größe\n" + request.decode())

    def wait(self, request: bytes) -> bytes:
        self.go_on.wait(LONG)
        return request

    def count(self, request: bytes) -> Iterator[bytes]:
        for number in range(int(request)):
            yield b"%d" % number

    def forever(self, request: bytes) -> Iterator[bytes]:
        try:
            while True:
                yield request
                self.go_on.wait(0.01)
        finally:
            self.closed.set()


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
    running = serve(path, example.services)
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
    assert call(channel, "Echo", request_) == request_


def test_many_calls_on_one_connection(channel: grpc.Channel, server: Server) -> None:
    for number in range(1200):
        assert call(channel, "Echo", b"%d" % number) == b"%d" % number
    assert server.clients == 1
