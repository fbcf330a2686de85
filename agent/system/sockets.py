"""Finds the process that listens on a socket."""

import contextlib
import errno
import os
import socket
import sys

from agent.system import opening

NOT_LISTENING = (errno.ECONNREFUSED, errno.EAGAIN, errno.EPROTOTYPE, errno.ELOOP)
"""connect(2)'s errors for a socket that is abandoned, full or of another type, and for files that are not sockets."""
TCP_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTEN = "0A"
"""TCP_LISTEN of include/net/tcp_states.h, as proc(5) shows it in column st."""
UCRED_SIZE = 12
"""Bytes of struct ucred: three 32-bit numbers (linux/socket.h)."""


def listening_process(place: str) -> int | None:
    """Return the id of the process that called listen(2), 0 if outside this PID namespace; None if no process listens.

    Connects and disconnects at once: sends nothing, follows no link. Raises OSError.
    """
    try:
        probe = opening.look_at(place, follow=False)
    except FileNotFoundError:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            # Then connect(2) returns EAGAIN instead of blocking if the listener accepts no connections any more.
            client.setblocking(False)
            # By descriptor: sun_path holds only 107 bytes, and it connects to the very file that was opened.
            client.connect(f"/proc/self/fd/{probe}")
            # unix(7): the listener's, as they were when it called listen(2).
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_SIZE)
    except OSError as error:
        if error.errno in NOT_LISTENING:
            return None
        raise
    finally:
        os.close(probe)
    return int.from_bytes(credentials[:4], sys.byteorder)


def listening_user(port: int) -> int | None:
    """Return the user id of the process that listens on a TCP port in this network namespace; None if none does.

    Only root with CAP_SYS_PTRACE could find the process itself. Any local address counts.
    """
    for table in TCP_TABLES:
        with contextlib.suppress(OSError), opening.plain(table) as lines:
            for line in lines:
                # Number, local address (hexadecimal, a colon before the port), remote address, state, queues, timer,
                # retransmissions, user (proc(5)).
                fields = line.decode(errors="replace").split()
                if len(fields) > 7 and fields[3] == LISTEN and fields[1].endswith(f":{port:04X}"):
                    return int(fields[7])
    return None
