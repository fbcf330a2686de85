"""Measures how long host and machines take to follow an event, until the pass that leaves nothing open."""

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram

BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Convergence:
    """Measures one convergence at a time: events that come meanwhile belong to the event that began it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "unbounded_agent_event_to_converged_seconds",
            "From an event to the end of the pass that left nothing to do and no report to wait for.",
            ["source"],
            registry=registry,
            buckets=BUCKETS,
        )
        self._source, self._since = "", 0.0

    def sources(self, names: Iterable[str]) -> None:
        """Create the series of all sources, so that the first increase is seen."""
        for name in names:
            self._seconds.labels(name)

    def begin(self, source: str, since: float) -> None:
        """Record that an event of this source was noticed; `since` is its time.monotonic()."""
        if not self._source:
            self._source, self._since = source, since

    def end(self) -> None:
        """Record that a pass ended without a failure, and that no machine's answer is pending."""
        if self._source:
            self._seconds.labels(self._source).observe(time.monotonic() - self._since)
        self._source = ""
