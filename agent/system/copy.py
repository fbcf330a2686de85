"""Copies the content of one file into another."""

import errno
import fcntl
import os
from collections.abc import Callable

FICLONE = 0x40049409
"""From linux/fs.h: makes a file share the extents of another one, ioctl_ficlone(2)."""
STEP = 64 << 20
"""Bytes between two calls of `progress`."""
CHUNK = 1 << 20
"""Bytes that are read and written at a time if the kernel cannot copy."""
KERNEL_CANNOT_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM})
"""Errors of copy_file_range(2) if the files are on two file systems (since Linux 5.19) or the file system cannot copy.
EPERM comes from a system-call filter."""


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
        # Some file systems copy nothing and report success (copy_file_range(2), BUGS): 0 does not mean the end.
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
