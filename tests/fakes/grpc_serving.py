"""Serves gRPC for this process, which takes the place of the kubelet."""

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection

from agent.dra.grpc_server import Limits, ListeningSocket, Method, Server, with_prefix
from agent.dra.kubelet import KubeletPeer
from tests.fakes.grpc_process import ECHO


def this_process() -> KubeletPeer:
    """Return a kubelet that is this process."""
    peer = KubeletPeer()
    peer.follow(os.getpid())
    return peer


THIS_PROCESS = this_process()
DEFAULT = Limits()


class Serving(Server):
    """Serves methods at a path."""

    def __init__(self, path: str, methods: Mapping[str, Method], limits: Limits = DEFAULT) -> None:
        self.path = path
        super().__init__(ListeningSocket(*os.path.split(path)), methods, THIS_PROCESS.refusal, limits)


def memory(process: int, field: str) -> int:
    """Return the KiB of memory that a process has in use (proc_pid_status(5))."""
    fields = dict(line.split(":") for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(fields[field].split()[0])


LONG = 300.0
"""Seconds: far more than anything here takes, even on a very busy machine."""


def slowly(request: bytes) -> bytes:
    time.sleep(0.2)
    return request


HELD = threading.Event()
METHODS: dict[str, Method] = {
    ECHO: bytes,
    "/test.Example/Slow": slowly,
    "/test.Example/Hold": lambda request: request if HELD.wait(LONG) else b"",
    "/test.Example/Fill": lambda _: bytes(8 << 20),
}
LIMITS = Limits(connections=4, greeting=0.5, stall=0.5)


@contextlib.contextmanager
def serving(limits: Limits) -> Iterator[Serving]:
    with tempfile.TemporaryDirectory() as directory:
        running = Serving(f"{directory}/test.sock", METHODS, limits)
        try:
            yield running
        finally:
            running.stop(0.1)


@contextlib.contextmanager
def connected(server: Serving) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(LONG)
        client.connect(server.path)
        yield client


def asking(path: str, size: int = 0) -> tuple[H2Connection, bytes]:
    """Return a client's connection, and the bytes of a call's request. Without a size, the request does not end."""
    http2 = H2Connection(H2Configuration(client_side=True))
    http2.initiate_connection()
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"}
    http2.send_headers(1, [*headers.items(), ("content-type", "application/grpc"), ("te", "trailers")])
    if size:
        http2.send_data(1, with_prefix(bytes(size)), end_stream=True)
    return http2, http2.data_to_send()
