"""Computes how long ago files changed, even if the wall clock is set in between."""

import time

from msgspec import Struct, field


class _Observation(Struct, frozen=True):
    ctime: float
    """The file's change time by the wall clock, which may have been set since."""
    changed_at: float
    """The file's change time by CLOCK_MONOTONIC."""
    observed_at: float
    """The time of the last observation, by CLOCK_MONOTONIC."""


class Ages(Struct):
    """Remembers the change times that this process saw, so that setting the wall clock can hardly distort an age.

    The first age of a file depends on the wall clock alone. If the change time later differs from the one that was
    observed last, the file changed after that observation: its age is at most the time since then, whatever the wall
    clock says.

    CLOCK_MONOTONIC stops while the host is suspended. So does the machine half's timer, so nothing is late after that.
    """

    _observations: dict[str, _Observation] = field(default_factory=dict)
    """The last observation of each file, by path."""

    def of(self, path: str, ctime: float) -> float:
        """Return the seconds since `ctime`, the file's change time. N seconds in the future count as N seconds ago.

        Unlike the mtime, the ctime cannot be chosen by whoever writes the file.
        """
        age, now = abs(time.time() - ctime), time.monotonic()
        last = self._observations.get(path)
        if last and last.ctime == ctime:
            changed_at = last.changed_at
        else:
            changed_at = now - (min(age, now - last.observed_at) if last else age)
        self._observations[path] = _Observation(ctime, changed_at, now)
        return now - changed_at
