"""The clock of a test: to sleep takes no time, and moves the clock on."""

import time
from collections.abc import Callable


class Clock:
    """Stands for `time.sleep` and `time.monotonic` of this process."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        """Seconds of each sleep; a test may clear it."""
        self.passed = 0.0
        """Seconds that were slept since the test began."""
        self.least = 0.0
        """Each sleep lasts at least so many seconds: a test of a long wait needs fewer passes."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Called in each sleep."""
        self._monotonic = time.monotonic

    def sleep(self, seconds: float) -> None:
        self.slept.append(max(seconds, self.least))
        self.passed += self.slept[-1]
        self.meanwhile()

    def monotonic(self) -> float:
        return self._monotonic() + self.passed
