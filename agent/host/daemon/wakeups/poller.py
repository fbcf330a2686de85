"""Waits for events that require a pass before the loop's timer expires. Everything runs in the loop's thread.

The loop also works without any event source.
"""

import logging
import math
import select
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct

from agent.model.faults import in_words
from agent.model.text import one_line

log = logging.getLogger(__name__)

BACK_OFF = 60.0
"""Maximum seconds between two attempts to open a lost source. If a source has worked for more than BACK_OFF seconds,
its earlier failures no longer count."""
GONE = select.POLLHUP | select.POLLNVAL
"""Events of a dead descriptor. POLLERR is not one of them: it may also mean an overflow."""


class Source(Protocol):
    """Reports changes of one kind on the host.

    If `open`, `polled` or `needs_pass` raises any exception, even one from a library, the source is lost: it is closed,
    and opened again later. An exception from `close` is logged.
    """

    name: str

    def open(self) -> None:
        """Begin to watch. Raises OSError."""
        ...

    def close(self) -> None:
        """Release everything that `open` has acquired, even if `open` failed."""
        ...

    def polled(self) -> Mapping[int, int]:
        """Return the events to wait for with poll(2), by file descriptor."""
        ...

    def needs_pass(self) -> bool:
        """Consume pending events without blocking, and return whether a pass is needed. Raises OSError."""
        ...


class Interrupt(Protocol):
    """The part of agent.host.daemon.signals.Signals that a wait needs."""

    @property
    def pending(self) -> bool: ...

    def fileno(self) -> int: ...

    def drain(self) -> None: ...


class Settling(Struct, frozen=True):
    """How long after events a pass begins, in seconds.

    One second of events causes at most three passes if the events come without a pause, otherwise at most four.
    """

    quiet: float = 0.002
    """Time without a further event before a pass begins, because related events come together. The time is short, so as
    not to delay a new GPU. It is long enough for nvidia-modprobe, which sets the mode of a node within microseconds of
    making the node."""
    longest: float = 0.5
    """The longest time from the first event to its pass, however many events follow."""
    spacing: float = 0.5
    """The minimum mean time between the starts of passes that events cause. After a silence, a second pass may directly
    follow the first one: a change of the host often comes in two steps, such as a device and then its mode."""


class Tally(Struct):
    """The counts of one source, for metrics."""

    name: str
    watching: bool = False
    wakeups: int = 0
    """Number of passes that the source caused."""
    losses: int = 0
    """How often the source broke, or could not be opened at the start."""


class _Tracked(Struct):
    """A source with its state. Times are by time.monotonic()."""

    source: Source
    tally: Tally
    failures: int = 0
    """Losses and failed attempts to open the source, in a row."""
    opened: float = 0.0
    """When the source was opened."""
    retry: float = 0.0
    """When a lost source is opened again."""


@dataclass(slots=True)
class Wakeups:
    """All sources. A lost source is opened again; that causes a pass, because the source may have missed events."""

    sources: Collection[Source] = ()
    settling: Settling = field(default_factory=Settling)
    _tracked: list[_Tracked] = field(init=False)
    _spaced: float = field(init=False, default=-math.inf)
    """When the next pass could begin at the earliest, by time.monotonic(), if passes for events always began at least
    `spacing` apart. In fact, the next pass may begin up to one `spacing` earlier than that."""
    first: float = field(init=False, default=-math.inf)
    """When the first event of the last wait was noticed, by time.monotonic(). An event during a pass is noticed at the
    end of the pass."""

    def __post_init__(self) -> None:
        self._tracked = [_Tracked(source, Tally(source.name)) for source in self.sources]

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """The tally of each source."""
        return tuple(tracked.tally for tracked in self._tracked)

    def watches(self, name: str) -> bool:
        """Return whether the source of this name exists and works."""
        return any(tracked.tally.watching for tracked in self._tracked if tracked.source.name == name)

    def open(self) -> None:
        """Open all sources. Call this before the first pass: otherwise, events before the first wait are missed."""
        for tracked in self._tracked:
            self._open(tracked)

    def wait(self, seconds: float, interrupt: Interrupt) -> str:
        """Wait for events. Return the name of the first source that needs a pass; empty on timeout or a signal."""
        deadline = time.monotonic() + seconds
        # Begin with the sources that had events during the last pass. `due` is a dict and not a set, because a dict
        # keeps the order in which the sources were noticed.
        due = dict.fromkeys(self._due(self._tracked))
        self.first = last = time.monotonic()
        while not interrupt.pending:
            now = time.monotonic()
            until = self._pass_time(self.first, last) if due else deadline
            if now >= until:
                break
            new = self._due(self._ready(until - now, interrupt))
            if new:
                last = time.monotonic()
                self.first = self.first if due else last
                due |= dict.fromkeys(new)
        if not due or interrupt.pending:
            return ""
        self._spaced = max(time.monotonic(), self._spaced) + self.settling.spacing
        for tracked in self._tracked:
            tracked.tally.wakeups += tracked.source.name in due
        return next(iter(due))

    def _pass_time(self, first: float, last: float) -> float:
        """Return when to begin the pass for events that came between `first` and `last`."""
        settling = self.settling
        return max(min(last + settling.quiet, first + settling.longest), self._spaced - settling.spacing)

    def _ready(self, seconds: float, interrupt: Interrupt) -> list[_Tracked]:
        """Wait for events, at most `seconds`. Return the sources that have events, and all lost sources."""
        owners: dict[int, _Tracked] = {}
        poll = select.poll()
        poll.register(interrupt.fileno(), select.POLLIN)
        closed = [tracked for tracked in self._tracked if not tracked.tally.watching]
        for tracked in (tracked for tracked in self._tracked if tracked.tally.watching):
            try:
                for descriptor, events in tracked.source.polled().items():
                    poll.register(descriptor, events)
                    owners[descriptor] = tracked
            except Exception as error:
                self._lose(tracked, in_words(error))
                closed.append(tracked)
        seconds = min([seconds, *(tracked.retry - time.monotonic() for tracked in closed)])
        polled = poll.poll(max(0, math.ceil(seconds * 1000)))
        for descriptor, events in polled:
            if descriptor == interrupt.fileno():
                interrupt.drain()
            elif events & GONE and owners[descriptor].tally.watching:
                self._lose(owners[descriptor], "its file descriptor was closed or hung up")
        ready = {id(owners[each]): owners[each] for each, _ in polled if each in owners}
        return [*ready.values(), *(tracked for tracked in closed if id(tracked) not in ready)]

    def _due(self, sources: Iterable[_Tracked]) -> list[str]:
        """Return the names of sources that need a pass: they had an event, or may have missed one while they were lost.

        Open lost sources again whose time for the next attempt has come.
        """
        due = []
        for tracked in sources:
            if not tracked.tally.watching:
                needs_pass = time.monotonic() >= tracked.retry and self._open(tracked)
            else:
                try:
                    needs_pass = tracked.source.needs_pass()
                except Exception as error:
                    needs_pass = False
                    self._lose(tracked, in_words(error))
            if needs_pass:
                due.append(tracked.source.name)
        return due

    def _open(self, tracked: _Tracked) -> bool:
        try:
            tracked.source.open()
        except Exception as error:
            self._lose(tracked, in_words(error))
            return False
        if tracked.failures:
            log.info("event source %s works again", tracked.source.name)
        tracked.tally.watching, tracked.opened = True, time.monotonic()
        return True

    def _lose(self, tracked: _Tracked, why: str) -> None:
        """Close a source, and set when to open it again: first at once, then after ever longer times.

        A loss is logged and counted once, even if attempts to open the source again fail.
        """
        now, tally = time.monotonic(), tracked.tally
        if tally.watching and now - tracked.opened > BACK_OFF:
            tracked.failures = 0
        if tally.watching or not tracked.failures:
            tally.losses += 1
            log.error(
                "event source %s lost, timed passes replace it until it works again: %s", tally.name, one_line(why)
            )
        tracked.failures += 1
        # Limit the exponent too: after a day of failures, the power would be too large for a float.
        doubled = min(tracked.failures - 2, 10)
        tracked.retry = now + (min(BACK_OFF, 2.0**doubled) if tracked.failures > 1 else 0.0)
        tally.watching = False
        try:
            tracked.source.close()
        except Exception as error:
            log.error("event source %s was not closed properly: %s", tally.name, in_words(error))
