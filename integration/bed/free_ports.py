"""Chooses TCP ports for servers of the tests."""

import socket


def free_ports(count: int) -> list[int]:
    """Return TCP ports of 127.0.0.1 on which nothing listens now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
