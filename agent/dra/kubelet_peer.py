"""Recognises the kubelet among the processes that connect to agent.dra.

The sockets are in directories of the kubelet that pods may have as hostPath volumes, and root in such a pod passes
every check of modes and users. So a connection counts only if it comes from the process that is the kubelet according
to systemd (agent.system.kubelet_identity).
"""

import contextlib
import errno
import os
import select
import socket
import struct
import threading

from agent.system import opening

SO_PEERPIDFD = 77
"""The option returns a pidfd of the process that connected (asm-generic/socket.h, Linux 6.5). socket has no name for it
yet."""
ENDED = (errno.ESRCH, errno.EINVAL)
"""The option's errors if the process has ended; EINVAL before Linux 6.15."""
CREDENTIALS = struct.Struct("=iII")
"""struct ucred of linux/socket.h: process id, user id, group id."""


class KubeletPeer:
    """The kubelet's process. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process, self._pidfd = 0, -1

    def follow(self, process: int) -> None:
        """Let this process be the kubelet from now on, if it runs."""
        with self._lock:
            self._forget()
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(process)
                self._process = process

    def is_followed(self, process: int) -> bool:
        """Return whether this process is the kubelet, and runs."""
        with self._lock:
            return process == self._process and self._runs()

    @property
    def runs(self) -> bool:
        """Whether the kubelet still runs."""
        with self._lock:
            return self._runs()

    def refusal(self, connection: socket.socket) -> str:
        """Return why the process that made a connection may not use it; empty if it is the kubelet. Raises OSError."""
        peer = _peer_process(connection)
        with self._lock:
            # While the kubelet runs, no other process can have its id.
            if not self._runs():
                return f"it is from process {peer}, and no kubelet runs as a service of this machine"
            if peer != self._process:
                return f"it is from process {peer}, and only the kubelet, process {self._process}, may connect"
        return ""

    def close(self) -> None:
        """Forget the kubelet: nobody may connect after that."""
        with self._lock:
            self._forget()

    def _runs(self) -> bool:
        if self._pidfd < 0:
            return False
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        return not ended.poll(0)

    def _forget(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._process, self._pidfd = 0, -1


def _peer_process(connection: socket.socket) -> int:
    """Return the id of the process that connected; 0 if it has ended, or is outside this PID namespace. Raises OSError.

    Before Linux 6.5, the id of a process that has ended is returned too, although another process may have it by now.
    The server accepts connections within milliseconds, so such an id would have to be reused within that time.
    """
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno in ENDED:
            return 0
        if error.errno != errno.ENOPROTOOPT:
            raise
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        process: int = CREDENTIALS.unpack(raw)[0]
        return process
    try:
        lines = opening.attribute(f"/proc/self/fdinfo/{pidfd}").decode().splitlines()
    finally:
        os.close(pidfd)
    # -1 for a process that has ended (proc(5)).
    return max(0, *(int(line.split()[1]) for line in lines if line.startswith("Pid:")))
