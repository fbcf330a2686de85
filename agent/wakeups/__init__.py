"""What makes the loop look again before its timer does. Everything in the loop's thread; no source is relied upon."""

import logging
import math
import select
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from agent.handoff import one_line

log = logging.getLogger("agent.wakeups")

BACK_OFF = 60.0
"""Seconds: the longest time between two attempts to open a lost source, and from then on a source counts as sound."""
GONE = select.POLLHUP | select.POLLNVAL
"""Of a descriptor that nothing comes from any more. POLLERR is none of these: it is how an overflow shows."""


class Source(Protocol):
    """Something that changes on the host. A library below it may raise anything: that is a loss."""

    name: str

    def open(self) -> None:
        """Watch from now on. Raises OSError."""
        ...

    def close(self) -> None:
        """Give back what `open` got, also when that failed half-way."""
        ...

    def polled(self) -> Mapping[int, int]:
        """The events to wait for, as poll(2) has them, by file descriptor."""
        ...

    def asks(self) -> bool:
        """Take all that waits, without blocking; whether any of it asks for a pass. Raises OSError for a loss."""
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
    """Without a further event, before a pass: what belongs together comes together."""
    longest: float = 0.5
    """From the first event to its pass, however many follow it."""
    spacing: float = 0.5
    """Between the starts of two passes that events asked for."""


@dataclass(slots=True)
class Tally:
    """One source, as the metrics show it."""

    name: str
    watching: bool = False
    wakeups: int = 0
    """Passes that it asked for."""
    losses: int = 0
    """Times that it broke, or could not be opened at the start."""


@dataclass(slots=True)
class _Kept:
    """A source and when to open it again."""

    source: Source
    tally: Tally
    failures: int = 0
    """In a row: losses, and attempts to open it."""
    opened: float = 0.0
    retry: float = 0.0
    """time.monotonic()."""


@dataclass(slots=True)
class Wakeups:
    """All sources. One that is lost is opened again, with a pass, as it may have missed something."""

    sources: Collection[Source] = ()
    settling: Settling = field(default_factory=Settling)
    _kept: list[_Kept] = field(init=False)
    _last: float = field(init=False, default=-math.inf)
    """When an event last led to a pass."""
    first: float = field(init=False, default=-math.inf)
    """When the first event of the last wait was noticed, time.monotonic(): what came during a pass, at its end."""

    def __post_init__(self) -> None:
        self._kept = [_Kept(source, Tally(source.name)) for source in self.sources]

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """Each source's."""
        return tuple(kept.tally for kept in self._kept)

    def watches(self, name: str) -> bool:
        """Whether that source exists and works."""
        return any(kept.tally.watching for kept in self._kept if kept.source.name == name)

    def open(self) -> None:
        """Before the first pass, so that nothing is missed between its look and the first wait."""
        for kept in self._kept:
            self._open(kept)

    def wait(self, seconds: float, interrupt: Interrupt) -> str:
        """The source that asked for a pass; empty when the time is over, or a signal came."""
        deadline = time.monotonic() + seconds
        # What came during the pass, too. dict: in the order of coming.
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
        """When the pass that was asked for begins."""
        settling = self.settling
        return max(min(last + settling.quiet, first + settling.longest), self._last + settling.spacing)

    def _ready(self, seconds: float, interrupt: Interrupt) -> list[_Kept]:
        """Wait for events; the sources that have some, or that are to be opened again."""
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
        """Names of the sources that ask for a pass: by an event, or because they may have missed some."""
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
        """Said and counted once, until it is opened again; then at once, but soon less often if it does not last."""
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
