"""Sockets on which the kubelet calls agent.dra. Only root may connect."""

import contextlib
import os
import socket
import stat
import struct

from agent.model.errors import AgentError
from agent.system import opening

DIRECTORY_MODE = 0o700
BACKLOG = 128
"""How many connections may wait to be accepted. Further clients wait or, if non-blocking, get EAGAIN (connect(2))."""
CREDENTIALS = struct.Struct("=iII")
"""struct ucred of linux/socket.h: process id, user id, group id."""


class ListeningSocket:
    """A socket that listens at a path. It replaces any file there, such as a socket that an earlier process left."""

    def __init__(self, path: str) -> None:
        """Listen at `path`. Creates the directory if it is missing. Raises AgentError."""
        self.path = path
        directory, name = os.path.split(path)
        try:
            os.makedirs(directory, DIRECTORY_MODE, exist_ok=True)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                self._identity = self._bind(directory, name)
                self.socket.listen(BACKLOG)
            except OSError:
                self.socket.close()
                raise
        except OSError as error:
            raise AgentError(
                f"{path}: cannot listen: {error.strerror}",
                f"check that {directory} is a directory that root can write to, and that {name} is not a directory",
            ) from error

    def _bind(self, directory: str, name: str) -> tuple[int, int]:
        """Bind the socket, and return its file's identity. Raises OSError."""
        descriptor = opening.open_probe(directory)
        try:
            # The path leads through the directory's descriptor, because sun_path has room for only 107 bytes.
            short_path = f"/proc/self/fd/{descriptor}/{name}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(short_path)
            # The mode is set before `bind`, because the file is made with the mode of the socket (unix_bind in the
            # kernel). So there is no moment at which other users can connect.
            os.fchmod(self.socket.fileno(), 0o600)
            self.socket.bind(short_path)
            return _identity(short_path)
        finally:
            os.close(descriptor)

    @property
    def in_place(self) -> bool:
        """Whether the path still leads to this socket: somebody may have removed or replaced it."""
        with contextlib.suppress(OSError):
            return _identity(self.path) == self._identity
        return False

    def close(self) -> None:
        """Stop listening, and remove the socket's file, unless it now is another socket's."""
        if self.in_place:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self.socket.close()


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process that connected. Raises OSError."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    user: int = CREDENTIALS.unpack(raw)[1]
    return user


def _identity(path: str) -> tuple[int, int]:
    """Return device and inode of a socket's file. Raises OSError."""
    status = os.lstat(path)
    if not stat.S_ISSOCK(status.st_mode):
        raise OSError(f"{path} is not a socket")
    return status.st_dev, status.st_ino
