"""Wakes the loop before its timer does. Everything runs in the loop's thread; the loop works without any source too."""

import logging
import math
import select
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from agent.model.text import one_line

log = logging.getLogger(__name__)

BACK_OFF = 60.0
"""Seconds: the longest time between two attempts to open a lost source; one that works for longer counts as sound."""
GONE = select.POLLHUP | select.POLLNVAL
"""Events of a dead descriptor. POLLERR is not among them: it also reports an overflow."""


class Source(Protocol):
    """Something on the host that changes. Any exception, such as one from a library, means that the source is lost."""

    name: str

    def open(self) -> None:
        """Begin to watch. Raises OSError."""
        ...

    def close(self) -> None:
        """Release what `open` acquired, even if that failed half-way."""
        ...

    def polled(self) -> Mapping[int, int]:
        """Return the events to wait for, as in poll(2), by file descriptor."""
        ...

    def asks(self) -> bool:
        """Consume pending events without blocking; return whether a pass is needed. Raises OSError for a loss."""
        ...


class Interrupt(Protocol):
    """Signals, as the wait sees them."""

    @property
    def pending(self) -> bool: ...

    def fileno(self) -> int: ...

    def drain(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Settling:
    """Seconds. Together: at most three passes for a second full of events."""

    quiet: float = 0.05
    """Time without a further event before a pass: related events come together."""
    longest: float = 0.5
    """Longest time from the first event to its pass, however many follow."""
    spacing: float = 0.5
    """Time between the starts of two passes that events cause."""


@dataclass(slots=True)
class Tally:
    """One source, as the metrics show it."""

    name: str
    watching: bool = False
    wakeups: int = 0
    """Passes that it caused."""
    losses: int = 0
    """Times that it broke, or could not be opened at the start."""


@dataclass(slots=True)
class _Kept:
    """A source and when to open it again."""

    source: Source
    tally: Tally
    failures: int = 0
    """Losses and failed attempts to open it, in a row."""
    opened: float = 0.0
    retry: float = 0.0
    """time.monotonic()."""


@dataclass(slots=True)
class Wakeups:
    """All sources. A lost one is opened again, which causes a pass, since it may have missed events."""

    sources: Collection[Source] = ()
    settling: Settling = field(default_factory=Settling)
    _kept: list[_Kept] = field(init=False)
    _last: float = field(init=False, default=-math.inf)
    """When an event last led to a pass."""
    first: float = field(init=False, default=-math.inf)
    """When the first event of the last wait was noticed, time.monotonic(); events during a pass count from its end."""

    def __post_init__(self) -> None:
        self._kept = [_Kept(source, Tally(source.name)) for source in self.sources]

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """The tally of each source."""
        return tuple(kept.tally for kept in self._kept)

    def watches(self, name: str) -> bool:
        """Return whether that source exists and works."""
        return any(kept.tally.watching for kept in self._kept if kept.source.name == name)

    def open(self) -> None:
        """Open all sources; before the first pass, so that no event between that and the first wait is missed."""
        for kept in self._kept:
            self._open(kept)

    def wait(self, seconds: float, interrupt: Interrupt) -> str:
        """Wait for events; return the source that needs a pass. Empty if the time is over, or a signal came."""
        deadline = time.monotonic() + seconds
        # Include events that came during the pass. A dict keeps their order.
        asked = dict.fromkeys(self._ask(self._kept))
        self.first = last = time.monotonic()
        while not interrupt.pending:
            now = time.monotonic()
            until = self._start(self.first, last) if asked else deadline
            if now >= until:
                break
            new = self._ask(self._ready(until - now, interrupt))
            if new:
                last = time.monotonic()
                self.first = self.first if asked else last
                asked |= dict.fromkeys(new)
        if not asked or interrupt.pending:
            return ""
        self._last = time.monotonic()
        for kept in self._kept:
            kept.tally.wakeups += kept.source.name in asked
        return next(iter(asked))

    def _start(self, first: float, last: float) -> float:
        """Return when the pass for these events begins."""
        settling = self.settling
        return max(min(last + settling.quiet, first + settling.longest), self._last + settling.spacing)

    def _ready(self, seconds: float, interrupt: Interrupt) -> list[_Kept]:
        """Wait for events; return the sources that have some, or that must be opened again."""
        owners: dict[int, _Kept] = {}
        poll = select.poll()
        poll.register(interrupt.fileno(), select.POLLIN)
        closed = [kept for kept in self._kept if not kept.tally.watching]
        for kept in self._kept:
            for descriptor, events in kept.source.polled().items() if kept.tally.watching else ():
                owners[descriptor] = kept
                poll.register(descriptor, events)
        seconds = min([seconds, *(kept.retry - time.monotonic() for kept in closed)])
        found = poll.poll(max(0, math.ceil(seconds * 1000)))
        for descriptor, events in found:
            if descriptor == interrupt.fileno():
                interrupt.drain()
            elif events & GONE and owners[descriptor].tally.watching:
                self._lose(owners[descriptor], "its file descriptor was closed or hung up")
        ready = {id(owners[each]): owners[each] for each, _ in found if each in owners}
        return [*ready.values(), *(kept for kept in closed if id(kept) not in ready)]

    def _ask(self, those: Iterable[_Kept]) -> list[str]:
        """Return the names of the sources that need a pass: after an event, or because they may have missed some."""
        asking = []
        for kept in those:
            if not kept.tally.watching:
                asks = time.monotonic() >= kept.retry and self._open(kept)
            else:
                try:
                    asks = kept.source.asks()
                except Exception as error:
                    asks = False
                    self._lose(kept, f"{type(error).__name__}: {error}")
            if asks:
                asking.append(kept.source.name)
        return asking

    def _open(self, kept: _Kept) -> bool:
        try:
            kept.source.open()
        except Exception as error:
            self._lose(kept, f"{type(error).__name__}: {error}")
            return False
        if kept.failures:
            log.info("%s: watched again", kept.source.name)
        kept.tally.watching, kept.opened = True, time.monotonic()
        return True

    def _lose(self, kept: _Kept, why: str) -> None:
        """Log and count a loss once, close the source, and schedule its opening: at once, then ever less often."""
        now, tally = time.monotonic(), kept.tally
        if tally.watching and now - kept.opened > BACK_OFF:
            kept.failures = 0
        if tally.watching or not kept.failures:
            tally.losses += 1
            log.error("%s: not watched, passes by the timer make up for it: %s", tally.name, one_line(why))
        kept.failures += 1
        kept.retry = now + (min(BACK_OFF, 2.0 ** (kept.failures - 2)) if kept.failures > 1 else 0.0)
        tally.watching = False
        kept.source.close()
