"""Real sockets."""

import os
import socket

import pytest

from agent.host.daemon.server import peer_user

NOBODY = 65534


def connected_as_nobody(family: socket.AddressFamily, where: object) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection, the server's first; a process of another user made the client's socket."""
    with socket.socket(family) as listening:
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind((where, 0))
        listening.listen()
        os.seteuid(NOBODY)
        try:
            client = socket.socket(family if where != "::" else socket.AF_INET)
        finally:
            os.seteuid(0)
        client.connect(("127.0.0.1" if where == "::" else where, listening.getsockname()[1]))
        return listening.accept()[0], client


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("family", "where"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")]
)
def test_the_user_at_the_other_end(family: socket.AddressFamily, where: str) -> None:
    try:
        server, client = connected_as_nobody(family, where)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with server, client:
        assert (peer_user(server), peer_user(client)) == (NOBODY, 0)


def test_the_user_at_the_other_end_of_a_unix_socket() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert peer_user(one) == os.geteuid()


def test_a_peer_that_the_kernel_does_not_know_has_its_address() -> None:
    """It is on another host, or has hung up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        server = listening.accept()[0]
        with server:
            # Without this, the socket would wait for the other end.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            address = server.getpeername()[0]
            assert peer_user(server) == os.geteuid()
            client.close()
            assert peer_user(server) in ("", address)
