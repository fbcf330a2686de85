"""Finds the user that listens on a port, and the user at the other end of a connection."""

import contextlib
import errno
import socket
import struct
import sys

from agent.system import opening
from agent.system.files import UCRED_SIZE

TCP_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTEN = "0A"
"""TCP_LISTEN (include/net/tcp_states.h), as column `st` of these tables shows it (proc(5))."""
SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1
"""The netlink family, its one message type, and the flag of a request (linux/netlink.h, linux/sock_diag.h)."""
DIAG_REQUEST = "=LHHLL BBxxL"
"""struct nlmsghdr, and struct inet_diag_req_v2 without its last field (linux/inet_diag.h)."""
DIAG_SOCKET = "!HH16s16s"
"""struct inet_diag_sockid without the interface and the cookie: ports and addresses of both ends."""
DIAG_USER = 80
"""Where the user's id is in the answer: after nlmsghdr (16 bytes), four bytes, inet_diag_sockid (48), three numbers."""


def listening_user(port: int) -> int | None:
    """Return the user id of the process that listens on a TCP port of any local address; None if none is found.

    Only processes in this network namespace are found. The process id is not returned, because finding it would need
    CAP_SYS_PTRACE.
    """
    for table in TCP_TABLES:
        with contextlib.suppress(OSError), opening.plain(table) as lines:
            for line in lines:
                # The fields are number, local address (hexadecimal, a colon before the port), remote address, state,
                # queues, timer, retransmissions and user (proc(5)).
                fields = line.decode(errors="replace").split()
                if len(fields) > 7 and fields[3] == LISTEN and fields[1].endswith(f":{port:04X}"):
                    return int(fields[7])
    return None


def peer_user(connection: socket.socket) -> int | str:
    """Return the id of the user at the other end of a stream connection; the address if that is not known.

    It is not known of another host or network namespace, or if the kernel lacks the module tcp_diag.
    """
    if connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_SIZE)
        return int.from_bytes(credentials[4:8], sys.byteorder)
    address = ""
    with contextlib.suppress(OSError):
        address, port = connection.getpeername()[:2]
        return _user_of(connection.family, (address, port), connection.getsockname()[:2])
    return address


def _user_of(family: int, local: tuple[str, int], remote: tuple[str, int]) -> int:
    """Return the user of the TCP socket of this network namespace that has these addresses. Raises OSError."""
    ports = local[1], remote[1]
    addresses = [socket.inet_pton(family, each.partition("%")[0]) for each in (local[0], remote[0])]
    cookie = bytes(4) + b"\xff" * 8
    wanted = struct.pack(DIAG_SOCKET, *ports, *addresses) + cookie
    size = struct.calcsize(DIAG_REQUEST) + len(wanted)
    head = struct.pack(
        DIAG_REQUEST, size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0, family, socket.IPPROTO_TCP, 0xFFFFFFFF
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, SOCK_DIAG) as kernel:
        kernel.send(head + wanted)
        # The kernel answers before send(2) returns.
        answer = kernel.recv(4096)
    if len(answer) < DIAG_USER + 4 or int.from_bytes(answer[4:6], sys.byteorder) != SOCK_DIAG_BY_FAMILY:
        raise OSError(errno.ENOENT, "the kernel knows no such socket")
    return int.from_bytes(answer[DIAG_USER : DIAG_USER + 4], sys.byteorder)
