"""Finds the process that listens on a socket."""

import contextlib
import errno
import os
import socket
import sys

from agent.system import opening

NOT_LISTENING = (errno.ECONNREFUSED, errno.EAGAIN, errno.EPROTOTYPE)
"""Errors of connect(2): no process listens, or the file is not a socket (ECONNREFUSED); the listener's queue is full
(EAGAIN); or the socket has another type (EPROTOTYPE)."""
TCP_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTEN = "0A"
"""TCP_LISTEN (include/net/tcp_states.h), as column `st` of these tables shows it (proc(5))."""
UCRED_SIZE = 12
"""Bytes of struct ucred: three 32-bit numbers (linux/socket.h)."""


def listening_process(place: str) -> int | None:
    """Return the id of the process that listens on a Unix socket; None if there is none, or it accepts no connections.

    The result is also None if the file is not a stream socket. The id is 0 for a process outside this PID namespace.
    This connects and disconnects at once, sends nothing, and follows no link. Raises OSError.
    """
    try:
        probe = opening.open_probe(place, follow=False)
    except FileNotFoundError:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            # With this, connect(2) returns EAGAIN instead of blocking if the listener no longer accepts connections.
            client.setblocking(False)
            # By descriptor: a path may be too long for sun_path (107 bytes), or lead to another file by now.
            client.connect(f"/proc/self/fd/{probe}")
            # unix(7): these are the credentials with which the listener called listen(2).
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_SIZE)
    except OSError as error:
        if error.errno in NOT_LISTENING:
            return None
        raise
    finally:
        os.close(probe)
    return int.from_bytes(credentials[:4], sys.byteorder)


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
