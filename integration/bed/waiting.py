"""Waits until something holds, and leaves the processors to what makes it hold."""

import time
from collections.abc import Callable
from typing import TypeVar

from integration.bed.process import BedError

T = TypeVar("T")

PAUSE_PER_QUESTION = 9
"""How many times as long as its question a pause is, within the limits below: kubectl, or a program in the emulated
machine, takes the processor from what is waited for."""
SHORTEST, LONGEST = 0.1, 3.0
"""Seconds between two questions."""


class NotReachedError(BedError):
    """What was waited for did not happen in time; the text has the evidence."""


def wait(
    what: str, reached: Callable[[], T], seconds: float, evidence: Callable[[], str] | None = None,
    *, longest_pause: float = LONGEST,
) -> T:  # fmt: skip
    """Return the first true value of `reached()`. Raises NotReachedError, with `evidence()`, after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if found := reached():
            return found
        now = time.monotonic()
        if now > deadline:
            raise NotReachedError(f"not within {seconds:.0f} s: {what}\n{evidence() if evidence else ''}")
        time.sleep(min(longest_pause, max(SHORTEST, PAUSE_PER_QUESTION * (now - asked))))
