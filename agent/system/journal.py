"""Writes lines to standard error, in the form that systemd reads for the journal."""

import math
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from agent.model.conditions import Condition, Status

INFO, WARNING, ERROR = "<6>", "<4>", "<3>"
"""Priorities, which precede a line (sd-daemon(3))."""


def say(priority: str, text: str) -> None:
    """Write the text to standard error. Unless that is a terminal, each line starts with the priority."""
    # The module logging is not used: importing it takes a fifth of a run that changes nothing.
    prefix = "" if sys.stderr.isatty() else priority
    sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.splitlines()))


def say_changes(before: dict[str, object], conditions: tuple[Condition, ...]) -> dict[str, str]:
    """Log the conditions that differ from `before`. Return what the next run has to pass as `before`.

    Logging all of them each minute would fill the journal with the same lines.
    """
    now = {each.type.value: f"{each.status} {each.reason}: {each.message}" for each in conditions}
    for each in conditions:
        if before.get(each.type.value) != now[each.type.value]:
            say(INFO if each.status is Status.TRUE else WARNING, f"{each.type} {now[each.type.value]}")
    return now


# Computes how long ago files changed, even if the wall clock is set in between.

KEPT = 3600.0
"""Seconds after which a file that is no longer observed is forgotten."""
STEP = 1.0
"""Seconds by which the difference of two clocks must change to show that the wall clock was set."""


class Observation(NamedTuple):
    """What was last seen of a file."""

    changed: float
    """The time of its last change by the wall clock, which may have been set since."""
    changed_at: float
    """The time of that change by CLOCK_MONOTONIC."""
    observed_at: float
    """The time of the observation by CLOCK_MONOTONIC."""


class Ages:
    """Remembers when files changed, so that setting the wall clock can hardly distort an age.

    The first age of a file depends on the wall clock alone. If a later observation finds another time of change than
    the observation before it, the file has changed between the two observations. Its age is then at most the time since
    the earlier one, whatever the wall clock says.

    CLOCK_MONOTONIC is the same in the host, its machines and all processes. It stops while the host is suspended, as
    the machine half's timer does, so no file looks too old after a suspend.
    """

    def __init__(self, observations: Mapping[str, Observation] | None = None) -> None:
        """`observations` are those that an earlier process has made since the host's boot, by path."""
        self._observations = dict(observations or {})
        self._ahead = time.time() - time.monotonic()
        """Seconds by which the wall clock is ahead of CLOCK_MONOTONIC.

        Computed again only after the wall clock was set, so that until then converted times keep their exact order.
        """

    def of(self, path: str, changed: float) -> float:
        """Return the seconds since the file's change; see `changed_at`."""
        changed_at = self.changed_at(path, changed)
        return time.monotonic() - changed_at

    def changed_at(self, path: str, changed: float) -> float:
        """Return the time of the file's change by CLOCK_MONOTONIC.

        If the wall clock was set back, a change may seem to be N seconds in the future. It then counts as N seconds
        ago. If an untrusted writer can change the file, `changed` must be its ctime, which a writer cannot choose.
        """
        now = time.monotonic()
        if abs(time.time() - now - self._ahead) >= STEP:
            self._ahead = time.time() - now
        last = self._observations.get(path)
        if last and last.changed == changed:
            changed_at = last.changed_at
        else:
            by_wall = changed - self._ahead
            changed_at = max(min(by_wall, 2 * now - by_wall), last.observed_at if last else -math.inf)
        self._observations[path] = Observation(changed, changed_at, now)
        return changed_at

    @property
    def observations(self) -> dict[str, Observation]:
        """The observations of the files that were observed in the last KEPT seconds."""
        oldest = time.monotonic() - KEPT
        return {path: each for path, each in self._observations.items() if each.observed_at >= oldest}
