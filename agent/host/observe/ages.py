"""Tells how long ago files changed, even if the clock is set meanwhile."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class _Seen:
    changed: float
    """The file's change time by the wall clock, which may have been set since."""
    born: float
    """The file's change time by CLOCK_BOOTTIME."""
    observed_at: float
    """The time of the last observation, by CLOCK_BOOTTIME."""


@dataclass(slots=True)
class Ages:
    """Remembers the change times that this process saw, so that only the first age of a file depends on the wall clock.

    If the change time of a file differs from the one observed last, the file changed after that observation.
    """

    _seen: dict[str, _Seen] = field(default_factory=dict)

    def of(self, path: str, changed: float) -> float:
        """Return the seconds since `changed`, the file's ctime. A time in the future counts as one equally long ago.

        Unlike the mtime, the ctime cannot be chosen by whoever writes the file.
        """
        age, now = abs(time.time() - changed), time.clock_gettime(time.CLOCK_BOOTTIME)
        known = self._seen.get(path)
        if known and known.changed == changed:
            born = known.born
        else:
            born = now - (min(age, now - known.observed_at) if known else age)
        self._seen[path] = _Seen(changed, born, now)
        return now - born
