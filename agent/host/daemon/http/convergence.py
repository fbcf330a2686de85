"""Measures the time from an event to the end of the pass after which nothing is left to do."""

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram

BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Convergence:
    """Measures one convergence at a time, from the first event. Events that come before it ends are part of it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "unbounded_agent_event_to_converged_seconds",
            "From an event to the end of the pass after which nothing is left to do and no report is pending.",
            ["source"],
            registry=registry,
            buckets=BUCKETS,
        )
        self._source, self._since = "", 0.0

    def sources(self, names: Iterable[str]) -> None:
        """Create the series of all sources with value 0, so that Prometheus sees the first increase."""
        for name in names:
            self._seconds.labels(name)

    def begin(self, source: str, since: float) -> None:
        """Begin a measurement at `since` (time.monotonic()), when the event was noticed, unless one is running."""
        if not self._source:
            self._source, self._since = source, since

    def end(self) -> None:
        """Record that a pass ended without failures or pending machines."""
        if self._source:
            self._seconds.labels(self._source).observe(time.monotonic() - self._since)
        self._source = ""
