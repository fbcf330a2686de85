"""The kernel log, /dev/kmsg: only what the kernel itself wrote (Documentation/ABI/testing/dev-kmsg)."""

import errno
import os
from collections.abc import Callable

from agent.model.digits import whole_number
from agent.system import opening

PATH = "/dev/kmsg"
RECORD_LIMIT = 8192
"""Bytes; a read with less room than the record gets EINVAL. The kernel's PRINTKRB_RECORD_MAX is 1024."""
BURST = 5000
"""Records in one `read`, so that a kernel that writes without end does not block the caller."""
KERNEL = 0
"""The facility of the kernel's own records. Records of user space get another one, whatever it requests."""


class KernelLog:
    """The kernel's own messages; each `read` returns those since the previous one."""

    def __init__(self, descriptor: int, read: Callable[[int, int], bytes] = os.read, after: int | None = None) -> None:
        """`descriptor` returns one record per read(2) and does not block; this object closes it.

        `after`: a record's sequence number. Of the records that are already there, only later ones are returned;
        without `after` none are, until a `read` first comes to the end.
        """
        self.overruns = 0
        """How often records were overwritten before they were read; skipped records do not count."""
        self.sequence = after
        """Number of the last record that was read, which grows until the host reboots; None before the first."""
        self.behind = True
        """Whether records from before this object was made are still unread."""
        self._descriptor, self._read, self._after = descriptor, read, after

    def fileno(self) -> int:
        """Return the descriptor for poll(2): readable when there is a record."""
        return self._descriptor

    def read(self) -> tuple[tuple[str, ...], bool]:
        """Return the first lines of the kernel's records, and whether there may be more.

        Leaves out records of user space. Raises OSError when the log is gone.
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
                # Overwritten; the next read returns the oldest remaining record.
                self.overruns += not self._passes_over
                continue
            if not record:
                self.behind = False
                return tuple(texts), False
            number, text = parse_record(record)
            # Only while behind: a number that is wrongly too high must not silence the log for ever.
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
    """Open the log at the oldest remaining record. Raises OSError.

    Needs CAP_SYSLOG if kernel.dmesg_restrict is set.
    """
    # Not at the end (SEEK_END): only a record shows a number, and a quiet kernel may write none for long.
    return KernelLog(opening.stream(path), after=after)


def parse_record(record: bytes) -> tuple[int | None, str | None]:
    """Return number and first line of a record `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS[,...];TEXT`.

    No text for a record of user space or for malformed data. The kernel writes control characters as \\xNN, so a text
    cannot begin a new line.
    """
    prefix, separator, rest = record.partition(b";")
    fields = prefix.decode(errors="replace").split(",")
    priority, number = map(whole_number, fields[:2]) if len(fields) > 1 else (None, None)
    if not separator or priority is None or number is None:
        return None, None
    if priority >> 3 != KERNEL:
        return number, None
    return number, rest.split(b"\n", 1)[0].decode(errors="replace")
