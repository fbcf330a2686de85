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
    """What the kernel writes; each `read` gives what came since the one before."""

    def __init__(self, descriptor: int, read: Callable[[int, int], bytes] = os.read, after: int | None = None) -> None:
        """`descriptor` gives one record a read(2) and does not block; this object closes it.

        `after`: the sequence number of a record; of what is there by now, only later ones are given. Without it none
        are, up to the first end that a `read` comes to.
        """
        self.overruns = 0
        """How often records that were to be given were overwritten before they were read."""
        self.sequence = after
        """Number of the last record that was read, which grows until the host reboots; None before the first."""
        self.behind = True
        """Whether what was written before this object was made is not read in full yet."""
        self._descriptor, self._read, self._after = descriptor, read, after

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
                self.behind = False
                return tuple(texts), False
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                # Overwritten; the next read gives the oldest record that is left.
                self.overruns += not self._passes_over
                continue
            if not record:
                self.behind = False
                return tuple(texts), False
            number, text = parse_record(record)
            # Only while behind: a number that is too high for whatever reason must not make deaf for ever.
            if number is None or (self.behind and self.sequence is not None and number <= self.sequence):
                continue
            self.sequence = number
            if text is not None and not self._passes_over:
                texts.append(text)
        return tuple(texts), True

    @property
    def _passes_over(self) -> bool:
        return self.behind and self._after is None

    def close(self) -> None:
        os.close(self._descriptor)


def open_kernel_log(path: str = PATH, after: int | None = None) -> KernelLog:
    """From the oldest record that is left. Raises OSError.

    Where kernel.dmesg_restrict is set it needs CAP_SYSLOG.
    """
    # Not at the end (SEEK_END): a number is only told by a record, and a quiet kernel may write none for long.
    return KernelLog(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), after=after)


def parse_record(record: bytes) -> tuple[int | None, str | None]:
    """Of a record `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS[,...];TEXT`: its number, and its first line.

    No text for a record of user space, neither for what is no record. The kernel writes control characters as \\xNN,
    so that no text can begin a line of its own.
    """
    prefix, separator, rest = record.partition(b";")
    priority, _, others = prefix.partition(b",")
    number = others.partition(b",")[0]
    if not separator or not priority.isdigit() or not number.isdigit():
        return None, None
    if int(priority) >> 3 != KERNEL:
        return int(number), None
    return int(number), rest.split(b"\n", 1)[0].decode(errors="replace")
