"""Waits until something holds. The pauses leave the processors to the work that makes it hold."""

import time
from collections.abc import Callable
from typing import TypeVar

from integration.bed.process import BedError

T = TypeVar("T")

PAUSE_PER_QUESTION = 9
"""A pause lasts this many times as long as the question before it, within the limits below. A question runs kubectl or
a program in the emulated machine, and so takes processor time from the work that is waited for."""
SHORTEST, LONGEST = 0.1, 3.0
"""Limits of a pause between two questions, in seconds."""


class NotReachedError(BedError):
    """What was waited for did not happen in time; the text has the evidence."""


def wait(
    what: str, reached: Callable[[], T], seconds: float, evidence: Callable[[], str] | None = None,
    *, longest_pause: float = LONGEST,
) -> T:  # fmt: skip
    """Return the first true value of `reached()`. Raises NotReachedError, with `evidence()`, after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if found := reached():
            return found
        now = time.monotonic()
        if now > deadline:
            raise NotReachedError(f"not within {seconds:.0f} s: {what}\n{evidence() if evidence else ''}")
        time.sleep(min(longest_pause, max(SHORTEST, PAUSE_PER_QUESTION * (now - asked))))
