"""Copies the content of one file into another."""

import errno
import fcntl
import os
from collections.abc import Callable

FICLONE = 0x40049409
"""ioctl_ficlone(2), from linux/fs.h: share the extents of another file."""
STEP = 64 << 20
"""Bytes between two calls of `progress`."""
CHUNK = 1 << 20
"""Bytes in memory at a time, if the kernel cannot copy."""
NOT_BY_THE_KERNEL = frozenset({errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM})
"""copy_file_range(2): two file systems (since Linux 5.19), or one that cannot. EPERM: a filter of system calls."""


def copy_content(reading: int, writing: int, progress: Callable[[], None]) -> None:
    """Reflink if the file system can, else copy. Calls `progress` after each step that is on disk.

    Copies as much as the file has at the start, even if it grows meanwhile; the caller compares the size.
    """
    try:
        fcntl.ioctl(writing, FICLONE, reading)
    except OSError:
        # EOPNOTSUPP, EXDEV, EINVAL: no reflinks here.
        left = os.fstat(reading).st_size
        while left > 0 and (copied := _copy_step(reading, writing, min(left, STEP))):
            left -= copied
            if left:
                # Without this, a hanging disk would go unnoticed: the page cache would take the data.
                os.fdatasync(writing)
                progress()


def _copy_step(reading: int, writing: int, size: int) -> int:
    """Return how many bytes were copied; 0 at the end of the file."""
    try:
        # Some file systems copy nothing and report success (copy_file_range(2), BUGS): then read and write as well.
        if copied := os.copy_file_range(reading, writing, size):
            return copied
    except OSError as error:
        if error.errno not in NOT_BY_THE_KERNEL:
            raise
    copied = 0
    while copied < size and (content := memoryview(os.read(reading, min(size - copied, CHUNK)))):
        copied += len(content)
        while content:
            content = content[os.write(writing, content) :]
    return copied
