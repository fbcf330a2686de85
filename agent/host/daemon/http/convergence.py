"""Measures the time from an event to the end of the pass after which nothing is left to do."""

import time

from prometheus_client import CollectorRegistry, Histogram

BUCKETS = (0.5, 2, 5, 15, 60, 300)


class Convergence:
    """Measures one convergence at a time, from its first event. Events that come during a measurement belong to it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "unbounded_agent_event_to_converged_seconds",
            "From an event to the end of the pass after which nothing is left to do and no report is pending.",
            registry=registry,
            buckets=BUCKETS,
        )
        self._since: float | None = None

    def begin(self, since: float) -> None:
        """Begin a measurement, unless one is running. `since` is when the event was noticed, by time.monotonic()."""
        if self._since is None:
            self._since = since

    def end(self) -> None:
        """Record that a pass ended without failures or pending machines."""
        if self._since is not None:
            self._seconds.observe(time.monotonic() - self._since)
        self._since = None
