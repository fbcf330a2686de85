"""Who listens on a Unix socket."""

import errno
import os
import socket
import sys

NOT_LISTENING = (errno.ECONNREFUSED, errno.EAGAIN, errno.EPROTOTYPE, errno.ELOOP)
"""What connect(2) says of a socket that was left behind, is full or of another type, and of files that are none."""
UCRED_SIZE = 12
"""Bytes of struct ucred: three 32-bit numbers (linux/socket.h)."""


def listening_process(place: str) -> int | None:
    """The id of the process that called listen(2), 0 for one outside of this PID namespace; None where nobody listens.

    Connected and closed at once: nothing is sent, no link is followed. Raises OSError.
    """
    try:
        probe = os.open(place, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            # Then connect(2) gives EAGAIN where nobody takes connections any more, instead of waiting.
            client.setblocking(False)
            # By descriptor: sun_path ends after 107 bytes, and what was opened is what is connected to.
            client.connect(f"/proc/self/fd/{probe}")
            # unix(7): of the listener, as it was when it called listen(2).
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_SIZE)
    except OSError as error:
        if error.errno in NOT_LISTENING:
            return None
        raise
    finally:
        os.close(probe)
    return int.from_bytes(credentials[:4], sys.byteorder)
