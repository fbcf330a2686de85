"""Waits until something holds, and leaves the processors to what makes it hold."""

import time
from collections.abc import Callable
from typing import TypeVar

from integration.bed.process import BedError

T = TypeVar("T")

# Asking takes a tenth of the time at most: kubectl, or a program in the emulated machine, takes the processor from what
# is waited for.
PAUSE = 9
SHORTEST, LONGEST = 0.1, 3.0
"""Seconds between two questions."""


class NotReachedError(BedError):
    """What was waited for did not happen in time; the text has the evidence."""


def wait(what: str, reached: Callable[[], T], seconds: float, evidence: Callable[[], str] = str) -> T:
    """Return the first true value of `reached()`. Raises NotReachedError, with `evidence()`, after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if found := reached():
            return found
        now = time.monotonic()
        if now > deadline:
            raise NotReachedError(f"not within {seconds:.0f} s: {what}\n{evidence()}")
        time.sleep(min(LONGEST, max(SHORTEST, PAUSE * (now - asked))))
