"""Handles SIGHUP, SIGTERM and SIGINT. All end the loop's wait.

SIGTERM and SIGINT also end a pass or a reload, after a grace period.
"""

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType

from agent.host.daemon.sd_notify import Notifier


class PassInterruptedError(BaseException):
    """The grace period after SIGTERM or SIGINT expired in a pass or reload. `except Exception` does not catch it."""


class Signals:
    """Handles the process's signals. Create only one object."""

    def __init__(self, notifier: Notifier, grace: float) -> None:
        self.reload = False
        self.stop = False
        self._notifier, self._grace = notifier, grace
        self._in_pass = False
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)
        # The interpreter's C handler writes to this socket, so no signal is lost between checking a flag and waiting.
        signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGHUP, self._on_reload)
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGALRM, self._on_grace_over)

    @property
    def pending(self) -> bool:
        """Whether the loop must stop waiting."""
        return self.stop or self.reload

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a signal arrives."""
        return self._reading.fileno()

    def drain(self) -> None:
        """Make the descriptor unreadable again. Call this before checking the flags."""
        with contextlib.suppress(BlockingIOError):
            self._reading.recv(4096)

    @contextlib.contextmanager
    def in_pass(self) -> Iterator[None]:
        """If the grace period ends while the block runs, raise PassInterruptedError in the block.

        The interruption leaves no half-written file, because files are written atomically. A reload is such a block
        too, because a file of the configuration may be on a disk that does not answer.
        """
        self._in_pass = True
        try:
            yield
        finally:
            self._in_pass = False

    def _on_reload(self, number: int, frame: FrameType | None) -> None:
        self.reload = True

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            # An earlier signal has begun the grace period. Do not begin it again.
            return
        self.stop = True
        self._notifier.send("STOPPING=1")
        signal.setitimer(signal.ITIMER_REAL, self._grace)

    def _on_grace_over(self, number: int, frame: FrameType | None) -> None:
        if self._in_pass:
            raise PassInterruptedError
