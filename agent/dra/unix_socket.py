"""Sockets on which the kubelet calls agent.dra, in directories to which pods may have access as hostPath volumes."""

import contextlib
import errno
import logging
import os
import socket
import stat
import time

from agent.model.errors import AgentError
from agent.system import opening

log = logging.getLogger(__name__)

DIRECTORY_MODE = 0o700
SOCKET_MODE = 0o600
BACKLOG = 128
"""How many connections may wait to be accepted. Further clients wait or, if non-blocking, get EAGAIN (connect(2))."""
ATTEMPTS = 5
"""How often to try if somebody keeps putting things in the socket's place."""


class ListeningSocket:
    """A socket that listens at a path.

    It replaces a socket that an earlier process left. Whatever else is in its place, or in that of its directories, is
    put aside: renamed, with a dot before its name, because the kubelet connects to every other socket that it sees.
    """

    def __init__(self, base: str, relative: str) -> None:
        """Listen at the path `relative` below the directory `base`. Creates directories that are missing.

        `base` is a directory of the kubelet, and may be a link. Below it, no link is followed. Raises AgentError.
        """
        self.path = f"{base}/{relative}"
        *directories, self._name = relative.split("/")
        try:
            os.makedirs(base, DIRECTORY_MODE, exist_ok=True)
            self._directory = _open_below(base, directories)
            try:
                self._listen()
            except OSError:
                os.close(self._directory)
                raise
        except OSError as error:
            raise AgentError(
                f"{self.path}: cannot listen: {error.strerror}",
                f"check that {base} is a directory that root can write to, and that nothing in it is a mount point or "
                "immutable (`findmnt`, `lsattr`)",
            ) from error

    def _listen(self) -> None:
        # The path leads through the directory's descriptor, because sun_path has room for only 107 bytes.
        place = f"/proc/self/fd/{self._directory}/{self._name}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # The mode is set before `bind`, because the file is made with the mode of the socket (unix_bind in the
            # kernel). So there is no moment at which other users can connect.
            os.fchmod(self.socket.fileno(), SOCKET_MODE)
            for attempt in range(ATTEMPTS):
                if _is_left_over(place):
                    os.unlink(self._name, dir_fd=self._directory)
                else:
                    _put_aside(self._directory, self._name, self.path)
                try:
                    self.socket.bind(place)
                    break
                except OSError:
                    if attempt == ATTEMPTS - 1:
                        raise
            self._identity = _identity(self._name, self._directory)
            self.socket.listen(BACKLOG)
        except OSError:
            self.socket.close()
            raise

    @property
    def in_place(self) -> bool:
        """Whether the path still leads to this socket: somebody may have removed or replaced it."""
        with contextlib.suppress(OSError):
            return _identity(self.path) == self._identity
        return False

    def close(self) -> None:
        """Stop listening, and remove the socket's file, unless it now is another socket's."""
        with contextlib.suppress(OSError):
            if _identity(self._name, self._directory) == self._identity:
                os.unlink(self._name, dir_fd=self._directory)
        os.close(self._directory)
        self.socket.close()


def _open_below(base: str, directories: list[str]) -> int:
    """Return a descriptor of a directory below `base`. Creates what is missing, and puts aside what is no directory."""
    descriptor, path = opening.open_probe(base), base
    for name in directories:
        outer, path = descriptor, f"{path}/{name}"
        try:
            descriptor = _open_directory(outer, name, path)
        finally:
            os.close(outer)
    return descriptor


def _open_directory(outer: int, name: str, path: str) -> int:
    place = f"/proc/self/fd/{outer}/{name}"
    for _ in range(ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            descriptor = opening.open_probe(place, follow=False)
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
            _put_aside(outer, name, path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, DIRECTORY_MODE, dir_fd=outer)
    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def _is_left_over(place: str) -> bool:
    """Return whether a file is a socket on which nobody listens."""
    try:
        probe = opening.open_probe(place, follow=False)
    except FileNotFoundError:
        return False
    try:
        if not stat.S_ISSOCK(os.fstat(probe).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
            client.connect(f"/proc/self/fd/{probe}")
    except ConnectionRefusedError:
        return True
    except OSError:
        # A socket of another type, or one with a full queue.
        return False
    finally:
        os.close(probe)
    return False


def _put_aside(directory: int, name: str, path: str) -> None:
    """Rename what is in the place of a socket or of its directory, if there is anything. Raises OSError."""
    aside = f".{name}.put-aside-{time.time_ns()}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=directory)
        log.warning("%s is not from this service: renamed to %s; find out who put it there, and remove it", path, aside)


def _identity(path: str, directory: int | None = None) -> tuple[int, int]:
    """Return device and inode of a socket's file. Raises OSError."""
    status = os.lstat(path, dir_fd=directory)
    if not stat.S_ISSOCK(status.st_mode):
        raise OSError(f"{path} is not a socket")
    return status.st_dev, status.st_ino
