"""The real HTTP server on an ephemeral loopback port."""

import contextlib
import errno
import http.client
import os
import select
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from socketserver import TCPServer

import pytest

from agent.host.daemon.server import (
    CONNECTIONS,
    HEAD_BYTES,
    OPENMETRICS,
    POLICY,
    VERBOSE,
    Limits,
    Page,
    Peers,
    Server,
    Site,
    listen_locally,
    listen_on,
)
from agent.model.errors import AgentError
from tests.fakes.local_socket import ask_locally
from tests.fakes.umask import umask
from tests.fakes.waiting import wait_for

LONG = 10**9


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server(listen_on("127.0.0.1:0"))
    running.site = Site(
        fresh={
            "/metrics": Page(HTTPStatus.OK, b"text\n", "text/plain; version=0.0.4"),
            "/metrics" + OPENMETRICS: Page(HTTPStatus.OK, b"# EOF\n", "application/openmetrics-text"),
            "/livez": Page(HTTPStatus.OK, b"ok\n"),
            "/livez" + VERBOSE: Page(HTTPStatus.OK, b"[+]loop ok\n"),
        },
        fresh_until=time.monotonic() + LONG,
    )
    yield running
    running.stop()


def ask(server: Server, method: str, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    """Send one request, and return the response, whatever its status, and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def reach(server: Server) -> socket.socket:
    return socket.create_connection(server.socket.getsockname()[:2], timeout=30)


TEXT = "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("method", "path", "accept", "status", "body", "kind"),
    [
        ("GET", "/livez", "", 200, b"ok\n", TEXT),
        ("HEAD", "/livez", "", 200, b"", TEXT),
        ("GET", "/livez?verbose", "", 200, b"[+]loop ok\n", TEXT),
        ("GET", "/livez?verbose=1&x", "", 200, b"ok\n", TEXT),
        ("GET", "/metrics", "", 200, b"text\n", "text/plain; version=0.0.4"),
        (
            *("GET", "/metrics", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"),
            *(200, b"# EOF\n", "application/openmetrics-text"),
        ),
        *(
            (method, "/metrics", "", 405, b"Method Not Allowed\n", TEXT)
            for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "MACHEN")
        ),
        *(
            ("GET", path, "", 404, b"Not Found\n", TEXT)
            for path in ("/", "/metrics/", "/../etc/passwd", "/%2e%2e/etc/passwd", "/livez%3Fverbose", "*")
        ),
    ],
)
def test_answers(server: Server, method: str, path: str, accept: str, status: int, body: bytes, kind: str) -> None:
    response, found = ask(server, method, path, **({"Accept": accept} if accept else {}))
    headers = response.headers
    assert (response.status, found, headers["Content-Type"]) == (status, body, kind)
    assert headers["Content-Length"] == str(len(body) if method != "HEAD" else 3)
    assert headers["Allow"] == ("GET, HEAD" if status == 405 else None)
    assert headers["Content-Security-Policy"] == POLICY
    assert POLICY.startswith("default-src 'none';")
    assert "script" not in POLICY


def answers(server: Server, *parts: bytes) -> bytes:
    """Send the parts, as far as the server takes them, and return the whole answer."""
    with reach(server) as peer, contextlib.suppress(ConnectionError):
        for part in parts:
            peer.sendall(part)
        with peer.makefile("rb") as answer:
            return answer.read()
    return b""


def test_garbage_is_answered_and_survived(server: Server) -> None:
    long = b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"
    for garbage in (b"\x00\xff\x16\x03\r\n\r\n", long, b"GET / HTTP/9.9\r\n\r\n"):
        assert len(answers(server, garbage)) < 500
    assert ask(server, "GET", "/livez")[1] == b"ok\n"


FIELD = b"X: " + b"x" * 95 + b"\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /livez HTTP/1.0\r\n" + FIELD * 90 + b"\r\n", 200),
        (b"GET /livez HTTP/1.0\r\n" + b"X: ".ljust(HEAD_BYTES - 25, b"x") + b"\r\n\r\n", 200),
        (b"GET /livez HTTP/1.0\r\n" + b"X: ".ljust(HEAD_BYTES - 24, b"x") + b"\r\n\r\n", 431),
        (b"GET /livez HTTP/1.0\r\nCookie: " + b"x" * 16_384, 431),
        (b"GET /livez HTTP/1.0\r\n" + b"X:\r\n" * 101 + b"\r\n", 431),
        (b"GET /" + b"x" * 16_384, 414),
    ],
    ids=["a browser's", "16 KiB", "one byte more", "one long field", "many fields", "a long path"],
)
def test_the_whole_head_has_a_limit(server: Server, head: bytes, status: int) -> None:
    assert answers(server, head).startswith(b"HTTP/1.0 %d " % status)


@pytest.mark.parametrize("kind", [b"Content-Length: 1000000000", b"Transfer-Encoding: chunked"])
def test_a_body_is_not_waited_for(server: Server, kind: bytes) -> None:
    """The peer announces it and sends nothing: the answer comes before any time limit."""
    server.limits = Limits(headers=60.0, whole=120.0)
    started = time.monotonic()
    answer = answers(server, b"GET /livez HTTP/1.1\r\nExpect: 100-continue\r\n" + kind + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 200 ")
    assert time.monotonic() - started < 30


SERVE = """
import time
from agent.host.daemon.server import Limits, Server, listen_on
server = Server(listen_on("127.0.0.1:0"), limits=Limits(headers=60.0, whole=120.0))
print(server.server_address[1], flush=True)
time.sleep(600)
"""
LONG_FIELD = b"X: " + b"x" * 65_000 + b"\r\n"
ATTACKS = {
    "long fields": [b"GET /livez HTTP/1.0\r\n", *[LONG_FIELD] * 98, b"\r\n"],
    "one line": [b"GET /" + b"x" * 60_000] * 20,
    "a body": [b"POST / HTTP/1.0\r\nContent-Length: 6500000\r\n\r\n", *[LONG_FIELD] * 100],
    "many short fields": [b"GET /livez HTTP/1.0\r\n", b"a:\r\n" * 1_000_000],
}


def peak_memory(process: int) -> int:
    """Return the most memory that a process has ever had, in bytes."""
    (line,) = [each for each in Path(f"/proc/{process}/status").read_text().splitlines() if each.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def attack(port: int, parts: list[bytes]) -> None:
    """Send all parts, unless the server ends the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as peer, contextlib.suppress(ConnectionError):
        for part in parts:
            peer.sendall(part)
        peer.recv(4096)


def test_attack_requests_cost_little_memory() -> None:
    """A client with 98 header lines of 65,000 bytes once took the service to 715 MiB."""
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[4]) as process:
        try:
            assert process.stdout
            port = int(process.stdout.readline())
            attack(port, [b"GET /livez HTTP/1.0\r\n\r\n"])
            for parts in ATTACKS.values():
                before = peak_memory(process.pid)
                with ThreadPoolExecutor(CONNECTIONS) as threads:
                    for each in [threads.submit(attack, port, parts) for _ in range(3 * CONNECTIONS)]:
                        each.result()
                assert peak_memory(process.pid) - before < 8 * 1024 * 1024
        finally:
            process.kill()


def connect(server: Server, stack: ExitStack, count: int) -> list[socket.socket]:
    """Return sockets of connected peers that have sent nothing."""
    return [stack.enter_context(reach(server)) for _ in range(count)]


def serving() -> int:
    """Return how many connections have a thread."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


HEADERS = Limits().headers


def test_idle_and_trickling_peers_free_their_places_soon(server: Server) -> None:
    """In a slowloris attack, each byte would restart a socket's own time limit."""
    server.limits = Limits(whole=60.0)
    with ExitStack() as stack:
        started = time.monotonic()
        *idle, trickling = connect(server, stack, CONNECTIONS)
        trickling.sendall(b"GET /livez HTTP/1.0\r\n")
        with contextlib.suppress(ConnectionError):
            while not select.select([trickling], [], [], 0.1)[0]:
                trickling.sendall(b"X")
        assert HEADERS * 0.9 < time.monotonic() - started < 30
        assert [peer.recv(1) for peer in idle] == [b""] * len(idle)
        wait_for(lambda: serving() == 0)
        assert ask(server, "GET", "/livez")[1] == b"ok\n"


LARGE = Site({"/metrics": Page(HTTPStatus.OK, b"x" * 32_000_000), "/livez": Page(HTTPStatus.OK, b"ok\n")}, {}, 1e12)
"""Its answer waits for a peer that does not read: unread data fills the socket's buffers."""


def test_a_peer_that_does_not_read_is_cut_at_the_deadline(server: Server) -> None:
    server.limits, server.site = Limits(whole=1.5), LARGE
    with ExitStack() as stack:
        (peer,) = connect(server, stack, 1)
        started = time.monotonic()
        peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        wait_for(lambda: serving() == 1)
        wait_for(lambda: serving() == 0)
        assert time.monotonic() - started > 1.5 - HEADERS, "what is left of the time after the request"


def test_attack_idle_peers_do_not_block_requests(server: Server) -> None:
    """They are cut after a second, but an attacker makes new ones: once, Prometheus was served 0 of 42 times."""
    server.limits = Limits(headers=60.0, whole=120.0)
    with ExitStack() as stack:
        idle = connect(server, stack, CONNECTIONS)
        wait_for(lambda: serving() == CONNECTIONS)
        for _ in range(3):
            idle += connect(server, stack, CONNECTIONS)
            assert ask(server, "GET", "/livez")[1] == b"ok\n"
        assert [peer.recv(1) for peer in idle[:CONNECTIONS]] == [b""] * CONNECTIONS, "the oldest ones had to go"
        wait_for(lambda: serving() <= CONNECTIONS)


def test_attack_peers_that_do_not_read_their_answers_do_not_block_requests(server: Server) -> None:
    server.limits, server.site = Limits(headers=0.3, whole=120.0), LARGE
    with ExitStack() as stack:
        for peer in connect(server, stack, CONNECTIONS):
            peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        wait_for(lambda: serving() == CONNECTIONS)
        time.sleep(0.4)
        assert ask(server, "GET", "/livez")[1] == b"ok\n"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def asks(peers: Peers, stack: ExitStack, *users: int | str) -> list[bool]:
    """Return whether each user's connection was admitted. All requests are complete, and no answer has been read."""
    admitted = []
    for user in users:
        connection = stack.enter_context(socket.socket())
        admitted.append(peers.admit(connection, user, 60.0))
        peers.request_complete(connection)
    return admitted


def test_attack_a_peer_that_asks_again_and_again_leaves_slots_to_others(stack: ExitStack) -> None:
    peers = Peers(4)
    assert asks(peers, stack, *[65534] * 5) == [True, True, True, True, False]
    assert asks(peers, stack, 0, 0, 0) == [True, True, False], "until each has half of them"
    assert asks(peers, stack, 65534, "192.0.2.1") == [False, True], "it gets none of them back"
    # One user can have many ids, and one host many addresses. Each of them has only one slot.
    assert all(asks(Peers(4), stack, 100000, 100001, 100002, 100003, "192.0.2.1"))


def test_attack_idle_connections_of_one_peer_do_not_end_those_of_another(stack: ExitStack) -> None:
    """The connection of the other peer may be older, and its request under way."""
    pairs, peers = [socket.socketpair() for _ in range(4)], Peers(3)
    for each in pairs:
        stack.enter_context(each[0])
        stack.enter_context(each[1]).setblocking(False)
    assert all(peers.admit(pair[0], user, 60.0) for pair, user in zip(pairs, (0, 1, 1, 1), strict=True))
    assert pairs[1][1].recv(1) == b""
    with pytest.raises(BlockingIOError):
        pairs[0][1].recv(1)


def test_a_thread_that_cannot_be_started_costs_no_place(
    server: Server, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(CONNECTIONS + 1):
            assert connect(server, stack, 1)[0].recv(1) == b""
    # A closed connection in a place makes way for a new one, so an answer alone shows nothing.
    assert not server.peers.slots
    assert ask(server, "GET", "/livez")[1] == b"ok\n"


def test_a_connection_that_cannot_be_accepted_does_not_keep_the_processor_busy(
    server: Server, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still waits, so without a pause the thread would try again without end."""
    attempts = []

    def accept(self: TCPServer) -> None:
        attempts.append(self)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    (peer,) = connect(server, stack, 1)
    with monkeypatch.context() as patch:
        patch.setattr(TCPServer, "get_request", accept)
        connect(server, stack, 1)
        time.sleep(0.35)
        assert 0 < len(attempts) < 10
    peer.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
    assert peer.recv(4096).startswith(b"HTTP/1.0 200")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_attack_a_process_that_takes_the_port_is_named() -> None:
    """Any user of the host can take it, and serve `machine_ready 1`."""
    os.seteuid(65534)
    try:
        stolen = socket.socket()
    finally:
        os.seteuid(0)
    stolen.bind(("127.0.0.1", 0))
    stolen.listen()
    taken = r"metrics\.address: cannot listen on 127\.0\.0\.1:\d+: Address already in use by a process of user 65534, "
    advice = r"which answers Prometheus instead.*configure another .*`ss -lntp 'sport = :\d+'`"
    with stolen, pytest.raises(AgentError, match=taken + advice):
        listen_on(f"127.0.0.1:{stolen.getsockname()[1]}")


IPV6 = Path("/proc/net/if_inet6")


@pytest.mark.skipif(not IPV6.exists() or f"{1:032x}" not in IPV6.read_text(), reason="there is no IPv6 loopback")
def test_an_ipv6_literal() -> None:
    running = Server(listen_on("[::1]:0"))
    try:
        assert b"404" in answers(running, b"GET / HTTP/1.0\r\n\r\n")
    finally:
        running.stop()


def test_a_local_server_is_private_and_replaces_a_former_socket(tmp_path: Path) -> None:
    """The directory's path is longer than the address of a socket may be."""
    with pytest.raises(AgentError, match="nowhere/statusz"):
        listen_locally(str(tmp_path / "nowhere"), "statusz.sock")
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    with umask(0):
        for body in (b"first\n", b"second\n"):
            server = Server(listen_locally(str(directory), "statusz.sock"))
            try:
                assert stat.S_IMODE((directory / "statusz.sock").stat().st_mode) == 0o600
                server.site = Site({"/statusz": Page(HTTPStatus.OK, body)}, {}, time.monotonic() + LONG)
                assert ask_locally(directory / "statusz.sock", "/statusz").endswith(b"\r\n\r\n" + body)
                assert b" 404 " in ask_locally(directory / "statusz.sock", "/other")
            finally:
                server.stop()
