"""Reads the kernel's own messages from the kernel log, /dev/kmsg (Documentation/ABI/testing/dev-kmsg)."""

import contextlib
import errno
import os
from collections.abc import Callable

from agent.model.digits import whole_number
from agent.system import opening

PATH = "/dev/kmsg"
RECORD_LIMIT = 8192
"""Bytes to read at a time: a read fails if the record is longer (EINVAL). The kernel's PRINTKRB_RECORD_MAX is 1024."""
BURST = 5000
"""The largest number of records that one `read` takes, so that it returns even if the kernel never stops writing."""
KERNEL = 0
"""The facility of the kernel's own records. Programs cannot write records with this facility."""


class KernelLog:
    """The kernel's own messages. Each `read` returns those since the previous one."""

    def __init__(self, descriptor: int, read: Callable[[int, int], bytes] = os.read, after: int | None = None) -> None:
        """Read from `descriptor`, which must return one record per read(2) and not block. This object closes it.

        Of the records that the log already has, only those after the sequence number `after` are returned; none of
        them if `after` is None.
        """
        self.overruns = 0
        """How often records were overwritten before they were read; skipped records do not count."""
        self.sequence = after
        """Sequence number of the last record that was read; at first `after`. It grows until the host reboots."""
        self.behind = True
        """Whether records that the log already had at the start are still unread."""
        self._descriptor, self._read, self._after = descriptor, read, after

    def fileno(self) -> int:
        """Return the descriptor for poll(2). It is readable when there is a record."""
        return self._descriptor

    def read(self) -> tuple[str, ...]:
        """Return the first line of each of the kernel's records since the previous call.

        Raises OSError if the log can no longer be read.
        """
        texts: list[str] = []
        for _ in range(BURST):
            try:
                record = self._read(self._descriptor, RECORD_LIMIT)
            except BlockingIOError:
                record = b""
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                # Records were overwritten; the next read returns the oldest remaining one.
                self.overruns += not self._skips
                continue
            if not record:
                self.behind = False
                break
            number, text = parse_record(record)
            # Records are skipped by their number only while `behind`. Otherwise, an `after` that is too high by mistake
            # would silence the log forever.
            if number is None or (self.behind and self.sequence is not None and number <= self.sequence):
                continue
            self.sequence = number
            if text is not None and not self._skips:
                texts.append(text)
        return tuple(texts)

    @property
    def _skips(self) -> bool:
        """Whether all records are skipped now: those that the log already had at the start, if `after` is None."""
        return self.behind and self._after is None

    def close(self) -> None:
        # The descriptor may be bad (EBADF): that can be the reason for closing it.
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def open_kernel_log(path: str = PATH, after: int | None = None) -> KernelLog:
    """Open the log at the oldest remaining record. Raises OSError.

    This needs CAP_SYSLOG if kernel.dmesg_restrict is set.
    """
    # Do not begin at the end (SEEK_END): the current sequence number is known only after a record was read, and the
    # next record may come much later.
    return KernelLog(opening.stream(path), after=after)


def parse_record(record: bytes) -> tuple[int | None, str | None]:
    """Return sequence number and first line of a record `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS[,...];TEXT`.

    The line is None for a record of user space; both are None for malformed data. The line cannot contain a line break:
    the kernel writes control characters as \\xNN.
    """
    prefix, separator, rest = record.partition(b";")
    fields = prefix.decode(errors="replace").split(",")
    priority, number = map(whole_number, fields[:2]) if len(fields) > 1 else (None, None)
    if not separator or priority is None or number is None:
        return None, None
    if priority >> 3 != KERNEL:
        return number, None
    return number, rest.split(b"\n", 1)[0].decode(errors="replace")
