"""sd_notify datagrams, the watchdog's interval and journal priorities."""

import io
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from agent.host.daemon.loop import STATUS_LIMIT, Notifier, log_to, watchdog_interval


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A service manager's socket, and its $NOTIFY_SOCKET."""
    address = f"@unbounded-agent-test-{uuid4()}" if request.param == "abstract" else str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        listening.settimeout(5)
        yield listening, address


def test_assignments_arrive_as_one_datagram(manager: tuple[socket.socket, str]) -> None:
    listening, address = manager
    Notifier(address).send("RELOADING=1", "MONOTONIC_USEC=42")
    assert listening.recv(4096) == b"RELOADING=1\nMONOTONIC_USEC=42"


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        # A line break would start another assignment.
        ("broken\nREADY=1 " + "x" * 10_000, b"STATUS=broken READY=1 xxx"),
        # Names of files on the host become surrogates, which no datagram can have.
        ("no pass: /opt/\udce9 is in the way", rb"STATUS=no pass: /opt/\udce9 is in the way"),
    ],
)
def test_status_is_one_bounded_line(manager: tuple[socket.socket, str], text: str, begins: bytes) -> None:
    listening, address = manager
    Notifier(address).status(text)
    received = listening.recv(65536)
    assert received.startswith(begins)
    assert b"\n" not in received
    assert len(received) <= STATUS_LIMIT + len("STATUS=")


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "180000000"}, 180.0),
        ({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": str(os.getpid())}, 180.0),
        ({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_watchdog_interval(environment: dict[str, str], seconds: float) -> None:
    assert watchdog_interval(environment) == seconds


def test_every_line_of_the_log_has_its_priority() -> None:
    stream = io.StringIO()
    log_to(stream)
    try:
        logging.getLogger("agent.host.daemon.loop").info("two\nlines")
        logging.getLogger("agent.host.daemon.loop").warning("care")
        logging.getLogger("agent.host.daemon.loop").error("failed")
    finally:
        logging.getLogger("agent").handlers.clear()
        logging.getLogger("agent").propagate = True
    assert stream.getvalue() == "<6>two\n<6>lines\n<4>care\n<3>failed\n"


@pytest.mark.processes
def test_only_own_sockets_that_accept_connections_are_taken() -> None:
    """Those for another process are left open.

    In a process of its own, whose descriptors from 3 on are a listening socket, another socket, and a file.
    """
    code = (
        "import os, sys; from agent.host.daemon.loop import listeners\n"
        "for target, source in enumerate(map(int, sys.argv[1:]), 3): os.dup2(source, target)\n"
        "assert listeners({'LISTEN_PID': '1', 'LISTEN_FDS': '1'}) == (), 'for another process'\n"
        "os.fstat(3)\n"
        "found = listeners({'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': str(len(sys.argv) - 1)})\n"
        "print(*(each.getsockname()[1] for each in found), [os.get_inheritable(each.fileno()) for each in found])"
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as good,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        open(os.devnull) as file,
    ):
        passed = [each.fileno() for each in (good, datagrams, file)]
        argv = [sys.executable, "-c", code, *map(str, passed)]
        finished = subprocess.run(argv, pass_fds=passed, capture_output=True, text=True, timeout=600)
        assert finished.stdout == f"{good.getsockname()[1]} [False]\n", finished.stderr
    assert finished.stderr.count("which systemd passed") == 2
