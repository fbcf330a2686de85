"""The addresses and sockets on which the pages are served."""

import socket
import time
from http import HTTPStatus
from pathlib import Path

import pytest

from agent.host.daemon.server import Endpoint, Page, Site
from agent.model.errors import AgentError

SITE = Site(fresh={"/livez": Page(HTTPStatus.OK, b"ok\n")}, fresh_until=time.monotonic() + 10**9)


def get(family: socket.AddressFamily, address: tuple[str, int] | str) -> bytes:
    """Send a request, and return the whole response."""
    with socket.socket(family) as connection:
        connection.settimeout(30)
        connection.connect(address)
        connection.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_sockets_of_systemd_are_served_instead_of_the_address(tmp_path: Path) -> None:
    """They outlive the service: stopping or moving it must not close them. One may be a Unix socket."""
    with socket.create_server(("127.0.0.1", 0)) as loopback, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        endpoint = Endpoint("192.0.2.1:1", (loopback.dup(), local.dup()))
        waiting = socket.create_connection(loopback.getsockname(), 30)
        waiting.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        endpoint.publish(SITE)
        with waiting:
            assert waiting.recv(15) == b"HTTP/1.0 200 OK", "not Not Found"
        assert endpoint.error == ""
        for _ in range(2):
            assert get(socket.AF_INET, loopback.getsockname()).endswith(b"\r\n\r\nok\n")
            assert get(socket.AF_UNIX, local.getsockname()).endswith(b"\r\n\r\nok\n")
            endpoint.listen()
            endpoint.move("192.0.2.2:1")
        assert loopback.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_the_same_port_on_another_address() -> None:
    """The kernel lets no two sockets listen on 127.0.0.1:PORT and 0.0.0.0:PORT."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    endpoint = Endpoint(f"127.0.0.1:{port}")
    endpoint.publish(SITE)
    endpoint.move(f"0.0.0.0:{port}")
    assert endpoint.error == ""
    assert get(socket.AF_INET, ("127.0.0.2", port)).endswith(b"\r\n\r\nok\n")


def test_a_wrong_address_never_closes_the_old_socket() -> None:
    """In a gap, another process could take its port, and say that machines are ready."""

    def inode() -> str:
        lines = Path("/proc/net/tcp").read_text().splitlines()
        (found,) = (line.split()[9] for line in lines if line.split()[1] == f"0100007F:{port:04X}")
        return found

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    endpoint = Endpoint(f"127.0.0.1:{port}")
    before = inode()
    with pytest.raises(AgentError, match="cannot listen"):
        endpoint.move(f"192.0.2.1:{port}")
    assert inode() == before
