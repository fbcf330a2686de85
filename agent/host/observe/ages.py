"""How long ago files changed, even if the clock is set meanwhile."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class _Seen:
    changed: float
    """The change time by the wall clock, which may have been set since."""
    born: float
    """The same moment by CLOCK_BOOTTIME, like `looked`."""
    looked: float


@dataclass(slots=True)
class Ages:
    """Remembers what this process saw of files, and uses the wall clock only for the first look at each.

    A file with another change time than at the last look has changed since then.
    """

    _seen: dict[str, _Seen] = field(default_factory=dict)

    def of(self, path: str, changed: float) -> float:
        """Return the seconds since `changed`, a ctime, which no writer can choose. One in the future counts as old."""
        age, now = abs(time.time() - changed), time.clock_gettime(time.CLOCK_BOOTTIME)
        known = self._seen.get(path)
        if known and known.changed == changed:
            born = known.born
        else:
            born = now - (min(age, now - known.looked) if known else age)
        self._seen[path] = _Seen(changed, born, now)
        return now - born
