"""Watches directories for names that appear, disappear or change, with inotify(7).

pyroute2's Inotify is not used, because it has no non-blocking read, treats a failed inotify_add_watch(2) as a success,
and exits when events overflow. inotify_simple only wraps the system calls, and machines do not have it.
"""

import ctypes
import fcntl
import os
import struct
import termios
from typing import NamedTuple

ATTRIB, CLOSE_WRITE = 0x4, 0x8
MOVED_FROM, MOVED_TO = 0x40, 0x80
CREATE, DELETE = 0x100, 0x200
MOVE_SELF = 0x800
Q_OVERFLOW, IGNORED = 0x4000, 0x8000
ONLYDIR = 0x1000000
HEADER = struct.Struct("=iIII")
"""struct inotify_event without the name: watch, mask, cookie, and the length of the name."""

_libc = ctypes.CDLL(None, use_errno=True)


class Event(NamedTuple):
    """What happened to a name in a watched directory, or to the directory itself."""

    watch: int
    mask: int
    name: str


class Inotify:
    """An inotify instance. Every method raises OSError."""

    def __init__(self) -> None:
        self._descriptor = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def fileno(self) -> int:
        return self._descriptor

    def add(self, path: str, mask: int) -> int:
        """Watch a path, and return the watch. If its inode is watched already, that is the existing watch."""
        return _checked(_libc.inotify_add_watch(self._descriptor, os.fsencode(path), ctypes.c_uint32(mask)), path)

    def remove(self, watch: int) -> None:
        _checked(_libc.inotify_rm_watch(self._descriptor, watch))

    def read(self) -> list[Event]:
        """Return the events that are pending now."""
        size: int = struct.unpack("i", fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4)))[0]
        data, events = os.read(self._descriptor, size) if size else b"", []
        while data:
            watch, mask, _, length = HEADER.unpack_from(data)
            end = HEADER.size + length
            events.append(Event(watch, mask, os.fsdecode(data[HEADER.size : end].rstrip(b"\0"))))
            data = data[end:]
        return events

    def close(self) -> None:
        os.close(self._descriptor)


def _checked(result: int, path: str | None = None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result
