"""Copies files, and makes the copies durable together."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from typing import BinaryIO, Self

FICLONE = 0x40049409
"""From linux/fs.h: makes a file share the extents of another one, ioctl_ficlone(2)."""
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
    """Reflink the content if the file system can; otherwise copy it in parts, and call `progress` between them.

    Copying in parts stops at the size that the file had at the start. A file that grows meanwhile goes unnoticed here:
    the caller checks for that.
    """
    try:
        fcntl.ioctl(writing, FICLONE, reading)
    except OSError:
        # EOPNOTSUPP, EXDEV, EINVAL: no reflink is possible between these files.
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
