"""The kernel's log, /dev/kmsg: only what the kernel itself wrote (Documentation/ABI/testing/dev-kmsg)."""

import errno
import os
from collections.abc import Callable

PATH = "/dev/kmsg"
RECORD_LIMIT = 8192
"""Bytes; a read that offers less than a record has gets EINVAL. The kernel's PRINTKRB_RECORD_MAX is 1024."""
BURST = 5000
"""Records taken in one go, so that a kernel that writes without end does not hold up the caller."""
KERNEL = 0
"""The facility of the kernel's own records. What user space writes gets another one, whatever it asks for."""


class KernelLog:
    """What the kernel writes from now on; each `read` gives what came since the one before."""

    def __init__(self, descriptor: int, read: Callable[[int, int], bytes] = os.read) -> None:
        """`descriptor` gives one record a read(2) and does not block; this object closes it."""
        self.overruns = 0
        """How often records were overwritten before they were read."""
        self._descriptor, self._read = descriptor, read

    def fileno(self) -> int:
        """For poll(2): readable when there is a record."""
        return self._descriptor

    def read(self) -> tuple[tuple[str, ...], bool]:
        """The first lines of the kernel's records, and whether there may be more. Raises OSError when the log is gone.

        Records of user space are left out.
        """
        texts: list[str] = []
        for _ in range(BURST):
            try:
                record = self._read(self._descriptor, RECORD_LIMIT)
            except BlockingIOError:
                return tuple(texts), False
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                # Overwritten; the next read gives the oldest record that is left.
                self.overruns += 1
                continue
            if not record:
                return tuple(texts), False
            text = kernel_text(record)
            if text is not None:
                texts.append(text)
        return tuple(texts), True

    def close(self) -> None:
        os.close(self._descriptor)


def open_kernel_log(path: str = PATH) -> KernelLog:
    """From its end on. Raises OSError; where kernel.dmesg_restrict is set it needs CAP_SYSLOG."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.lseek(descriptor, 0, os.SEEK_END)
    except OSError:
        os.close(descriptor)
        raise
    return KernelLog(descriptor)


def kernel_text(record: bytes) -> str | None:
    """The first line of a record `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS[,...];TEXT`; None for one of user space.

    The kernel writes control characters as \\xNN, so that no text can begin a line of its own.
    """
    prefix, separator, rest = record.partition(b";")
    priority = prefix.split(b",", 1)[0]
    if not separator or not priority.isdigit() or int(priority) >> 3 != KERNEL:
        return None
    return rest.split(b"\n", 1)[0].decode(errors="replace")
