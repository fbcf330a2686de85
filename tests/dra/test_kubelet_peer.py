"""Only the kubelet's process may use the driver's sockets, and no other process can pass for it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from agent.dra.kubelet import KubeletPeer
from tests.fakes.grpc_serving import serve, this_process
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.processes
LONG = 60.0
CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.settimeout(60);"
LAST_ID = Path("/proc/sys/kernel/ns_last_pid")
"""The id that the kernel gave to the last process of this PID namespace; the next one gets the next id (proc(5))."""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/sock")
        listening.listen()
        listening.settimeout(LONG)
        yield listening


@contextlib.contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def test_only_the_kubelet_may_connect(listener: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX) as client, sleeping() as other:
        client.connect(listener.getsockname())
        connection = listener.accept()[0]
        peer = this_process()
        assert peer.refusal(connection) == ""
        peer.follow(other.pid)
        refusal = peer.refusal(connection)
        assert refusal == f"it is from process {os.getpid()}, and only the kubelet, process {other.pid}, may connect"
        other.kill()
        other.wait()
        assert not peer.runs
        assert peer.refusal(connection).endswith("and no kubelet runs as a service of this machine")
        peer.follow(os.getpid())
        assert peer.refusal(connection) == ""
        peer.close()
        assert peer.refusal(connection)
        connection.close()


def test_a_process_that_does_not_run_is_not_followed() -> None:
    peer = KubeletPeer()
    with sleeping() as ended:
        pass
    peer.follow(ended.pid)
    assert not peer.runs
    assert not peer.is_followed(ended.pid)


def test_root_in_a_pod_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It passes every check of users and modes. Refusals are logged, but not every one."""
    server = serve(f"{tmp_path}/sock", {})
    for _ in range(3):
        argv = [sys.executable, "-c", f"{CONNECT} print(s.recv(100))", f"{tmp_path}/sock"]
        assert subprocess.run(argv, capture_output=True, text=True).stdout == "b''\n"
    assert caplog.text.count("refused a connection") == 1
    assert f"only the kubelet, process {os.getpid()}, may connect" in caplog.text
    with grpc.insecure_channel(f"unix:{tmp_path}/sock") as channel:
        grpc.channel_ready_future(channel).result(LONG)
    server.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can choose the next process id")
def test_a_process_whose_id_the_kubelet_gets_is_refused(listener: socket.socket) -> None:
    """The process connects and ends, another process keeps its connection open, and a new kubelet gets its id."""
    path = listener.getsockname()
    peer = KubeletPeer()
    for _ in range(200):
        first = subprocess.Popen([sys.executable, "-c", f"{CONNECT} s.recv(1)", path])
        connection = listener.accept()[0]
        first.send_signal(signal.SIGKILL)
        first.wait()
        LAST_ID.write_text(str(first.pid - 1))
        with sleeping() as kubelet:
            if kubelet.pid == first.pid:
                peer.follow(kubelet.pid)
                wait_for(lambda: peer.is_followed(kubelet.pid))
                refusal = peer.refusal(connection)
                connection.close()
                assert refusal.startswith("it is from process 0")
                peer.close()
                return
        connection.close()
    pytest.fail("no process got the id")
