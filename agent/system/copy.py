"""Copies files, and makes the copies durable together."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import BinaryIO, Self

from agent.model.errors import AgentError, ExitCodeError
from agent.system import removal
from agent.system.files import System

STEP = 64 << 20
"""Bytes between two calls of `progress`."""
CHUNK = 1 << 20
"""Bytes that are read and written at a time if the kernel cannot copy."""
KERNEL_CANNOT_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM})
"""Errors of copy_file_range(2) that mean that the kernel cannot copy this file: the file system does not support the
call; the two files are on different file systems (Linux 5.19 and later may refuse that); or a system-call filter
forbids the call (EPERM)."""

OPEN_LIMIT = 256
"""Copies that are open at the same time. systemd lets a service open 1024 files, unless it asks for more."""
UNSYNCED_LIMIT = 256 << 20
"""Bytes after which the copies are synced. One fsync(2) may wait until the data of all copies is written. That wait
must stay short, because `progress` is not called meanwhile."""


class Copies:
    """Copies that are durable at the end of a `with` block.

    The disk writes the copies, in any order, while further copies are made. Each copy stays open until it is durable:
    fsync(2) reports a failed write only to descriptors that were open when the write failed. `progress` is called after
    each part of a large copy, and each time that the disk has written a copy.
    """

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress
        self._open: list[BinaryIO] = []
        self._unsynced = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._sync()
        finally:
            for copy in self._open:
                copy.close()

    def add(self, reading: BinaryIO, writing: BinaryIO, mode: int) -> None:
        """Copy the content of an open file into the new file `writing`, and set its mode. Raises OSError.

        This object closes `writing`.
        """
        self._open.append(writing)
        copy_content(reading.fileno(), writing.fileno(), self._progress)
        os.fchmod(writing.fileno(), mode)
        # This makes the kernel begin to write the file's data (mm/fadvise.c). Some file systems ignore or refuse it.
        with contextlib.suppress(OSError):
            os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced += os.fstat(writing.fileno()).st_size
        if len(self._open) == OPEN_LIMIT or self._unsynced > UNSYNCED_LIMIT:
            self._sync()

    def _sync(self) -> None:
        for copy in self._open:
            os.fsync(copy.fileno())
            copy.close()
            self._progress()
        self._open.clear()
        self._unsynced = 0


def copy_content(reading: int, writing: int, progress: Callable[[], None]) -> None:
    """Copy the content in parts, and call `progress` between them. The kernel shares extents where it can.

    Copying stops at the size that the file had at the start. A file that grows meanwhile goes unnoticed here: the
    caller checks for that.
    """
    remaining = os.fstat(reading).st_size
    while remaining > 0 and (copied := _copy_step(reading, writing, min(remaining, STEP))):
        remaining -= copied
        if remaining:
            # Without this, the page cache would take all data, and a disk that hangs would go unnoticed.
            os.fdatasync(writing)
            progress()


def _copy_step(reading: int, writing: int, size: int) -> int:
    """Copy up to `size` bytes, and return how many were copied: 0 only at the end of the file."""
    try:
        # Some file systems copy nothing and report success (copy_file_range(2), BUGS). So 0 does not prove that this is
        # the end of the file: `os.read` below tells.
        if copied := os.copy_file_range(reading, writing, size):
            return copied
    except OSError as error:
        if error.errno not in KERNEL_CANNOT_COPY:
            raise
    copied = 0
    while copied < size and (content := memoryview(os.read(reading, min(size - copied, CHUNK)))):
        copied += len(content)
        while content:
            content = content[os.write(writing, content) :]
    return copied


# Removes trees in a process of its own, which can be stopped at its time limit (agent.system.removal).

DOOR = (sys.executable, "-IS", removal.__file__)
"""The program that removes trees. Its arguments are their paths."""
CHECK_LIMIT = 30.0
"""Seconds to read the list of mounts."""


def clear(paths: tuple[str, ...], system: System, limit: float) -> None:
    """Remove trees that a machine may have filled. Raises AgentError, for example if it takes over `limit` seconds."""
    _run(paths, system, limit)


def refuse_mounts(path: str, system: System) -> None:
    """Raise AgentError if anything is mounted at the path or below it, so that it cannot be removed."""
    _run(("--check", path), system, CHECK_LIMIT)


def _run(arguments: tuple[str, ...], system: System, limit: float) -> None:
    try:
        system.run(*DOOR, *arguments, timeout=limit)
    except ExitCodeError as error:
        # The program's own messages say what to do.
        again = "correct this, then run the same command again" if error.status == removal.MOUNTED else ""
        raise AgentError(error.stderr.strip().replace("\n", "; "), again) from error
