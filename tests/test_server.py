"""The real HTTP server on an ephemeral loopback port."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http import HTTPStatus

import pytest

from agent.errors import AgentError
from agent.server import CONNECTIONS, DEADLINE, OPENMETRICS, VERBOSE, Page, Server, Site

LONG = 10**9


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server("127.0.0.1:0")
    running.site = Site(
        fresh={
            "/metrics": Page(HTTPStatus.OK, b"text\n", "text/plain; version=0.0.4"),
            "/metrics" + OPENMETRICS: Page(HTTPStatus.OK, b"# EOF\n", "application/openmetrics-text"),
            "/livez": Page(HTTPStatus.OK, b"ok\n"),
            "/livez" + VERBOSE: Page(HTTPStatus.OK, b"[+]loop ok\n"),
        },
        stale={"/livez": Page(HTTPStatus.SERVICE_UNAVAILABLE, b"[-]loop\n")},
        fresh_until=time.monotonic() + LONG,
    )
    yield running
    running.stop()


def ask(server: Server, method: str, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    """One request; any status."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def test_pages_by_path_query_and_accept(server: Server) -> None:
    assert ask(server, "GET", "/livez")[1] == b"ok\n"
    assert ask(server, "GET", "/livez?verbose")[1] == b"[+]loop ok\n"
    assert ask(server, "GET", "/livez?verbose=1&x")[1] == b"ok\n"
    response, body = ask(server, "GET", "/metrics")
    assert (body, response.headers["Content-Type"]) == (b"text\n", "text/plain; version=0.0.4")
    response, body = ask(
        server, "GET", "/metrics", Accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    )
    assert (body, response.headers["Content-Type"]) == (b"# EOF\n", "application/openmetrics-text")


def test_head_has_no_body(server: Server) -> None:
    response, body = ask(server, "HEAD", "/livez")
    assert (response.status, response.headers["Content-Length"], body) == (200, "3", b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "MACHEN"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    response, body = ask(server, method, "/metrics")
    assert (response.status, response.headers["Allow"], body) == (405, "GET, HEAD", b"Method Not Allowed\n")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/../etc/passwd", "/%2e%2e/etc/passwd", "/livez%3Fverbose", "*"])
def test_unknown_paths_are_short_404s(server: Server, path: str) -> None:
    response, body = ask(server, "GET", path)
    assert (response.status, body) == (404, b"Not Found\n")


def test_garbage_is_answered_and_survived(server: Server) -> None:
    for garbage in (
        b"\x00\xff\x16\x03\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as peer:
            peer.sendall(garbage)
            answer = peer.recv(65536)
            assert len(answer) < 500
    assert ask(server, "GET", "/livez")[1] == b"ok\n"


def test_the_stale_edition_takes_over_by_itself(server: Server) -> None:
    """The loop need not run for that: a hung loop is just the case."""
    site = server.site
    server.site = Site(site.fresh, site.stale, fresh_until=time.monotonic() - 1)
    response, body = ask(server, "GET", "/livez?verbose")
    assert (response.status, body) == (503, b"[-]loop\n")


def test_slow_peers_are_cut_at_the_deadline_and_others_wait_their_turn(server: Server) -> None:
    """Slowloris: peers that send a byte now and then hold all places, but only for DEADLINE."""
    stop = threading.Event()

    def trickle(peer: socket.socket) -> None:
        try:
            while not stop.wait(0.2):
                peer.sendall(b"X")
        except OSError:
            pass

    with ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(CONNECTIONS)]
        threads = [threading.Thread(target=trickle, args=(peer,)) for peer in peers]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        started = time.monotonic()
        try:
            assert ask(server, "GET", "/livez")[1] == b"ok\n"
            waited = time.monotonic() - started
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert DEADLINE - 2 < waited < DEADLINE + 2
    assert ask(server, "GET", "/livez")[1] == b"ok\n"


def test_no_more_connections_than_places_have_threads(server: Server) -> None:
    with ExitStack() as stack:
        for _ in range(3 * CONNECTIONS):
            peer = stack.enter_context(socket.socket())
            peer.setblocking(False)
            peer.connect_ex(("127.0.0.1", server.port))
        time.sleep(0.5)
        serving = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
        assert len(serving) == CONNECTIONS


def test_ipv6_literal() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    running = Server("[::1]:0")
    try:
        assert running.socket.family is socket.AF_INET6
        with socket.create_connection(("::1", running.port), timeout=10) as peer:
            peer.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            assert b"404" in peer.recv(4096)
    finally:
        running.stop()


def test_a_taken_port_names_the_key(server: Server) -> None:
    with pytest.raises(
        AgentError, match=r"metrics\.address: cannot listen on 127\.0\.0\.1:\d+: Address already in use.*config\.toml"
    ):
        Server(f"127.0.0.1:{server.port}")


def test_an_impossible_port_names_the_key() -> None:
    with pytest.raises(AgentError, match=r"metrics\.address: cannot listen on 127\.0\.0\.1:99999"):
        Server("127.0.0.1:99999")


def test_a_stopped_server_frees_its_port(server: Server) -> None:
    second = Server("127.0.0.1:0")
    started = time.monotonic()
    second.stop()
    assert time.monotonic() - started < 1
    third = Server(f"127.0.0.1:{second.port}")
    third.stop()
