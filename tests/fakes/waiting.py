"""Waits in a test for what another thread or process does."""

import time
from collections.abc import Callable


def wait_for(holds: Callable[[], object], seconds: float = 60.0, what: str = "") -> None:
    """Wait until `holds()` is true. Raises AssertionError, which says `what`, after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
