"""Prepares all pages after each pass: a set to serve now, and a set to serve once the first one is too old."""

import os
import time
from collections.abc import Sequence

from msgspec import Struct

from agent import __version__
from agent.host.daemon.http import health, statusz
from agent.host.daemon.http.endpoint import Endpoint
from agent.host.daemon.http.front_page import front_page
from agent.host.daemon.http.gauges import View
from agent.host.daemon.http.local_server import LocalServer
from agent.host.daemon.http.metrics import OPENMETRICS, TEXT, Metrics, unseen, without_evidence
from agent.host.daemon.http.server import OPENMETRICS as OPENMETRICS_KEY
from agent.host.daemon.http.server import Page, Site
from agent.host.daemon.wakeups.poller import Tally
from agent.host.outcome import MachineOutcome, Outcome
from agent.system.damage import discarded
from agent.system.deadlines import stuck


class State(Struct, frozen=True):
    """What the loop knows after a pass."""

    machines: tuple[MachineOutcome, ...]
    """Every configured machine. One that no pass has evaluated yet has no conditions."""
    outcome: Outcome | None
    """The last outcome, even an old one; None before the first."""
    why_stale: str
    """Why there is no fresh observation; empty if there is one."""
    observed: float
    """When a pass last observed the devices of all vendors, in seconds since the epoch; 0 if none has."""
    config_good: bool
    config_loaded: float
    """When the configuration in force was read, in seconds since the epoch."""
    passes: Sequence[statusz.Pass]
    wakeups: tuple[Tally, ...]
    notes: tuple[health.Check, ...]
    """Further checks for /readyz?verbose that do not affect its status."""


class Publisher:
    """Gives pages to both servers."""

    def __init__(self, endpoint: Endpoint, local: LocalServer, metrics: Metrics, evidence: float) -> None:
        """`evidence` is how long an observation counts as fresh, in seconds."""
        self._endpoint, self._local, self._metrics, self._evidence = endpoint, local, metrics, evidence

    def publish(self, state: State) -> None:
        """Prepare two sets of pages: the current one, and one to serve if no pass ends in time."""
        too_long = f"no pass has ended for {self._evidence:.0f} s"
        fresh, stale = self._pages(state, state.why_stale), self._pages(state, too_long, alive=False)
        until = time.monotonic() + self._evidence
        self._endpoint.publish(Site(fresh, stale, until))
        self._local.site = Site(
            fresh | {"/statusz": self._statusz(state, state.why_stale)},
            stale | {"/statusz": self._statusz(state, too_long)},
            until,
        )

    def _knowledge(self, state: State, why_stale: str) -> statusz.Knowledge:
        return statusz.Knowledge(__version__, time.time(), why_stale, state.passes, state.wakeups, stuck())

    def _statusz(self, state: State, why_stale: str) -> Page:
        facts = state.outcome.facts if state.outcome else None
        return statusz.page(self._knowledge(state, why_stale), state.machines, facts)

    def _pages(self, state: State, why_stale: str, *, alive: bool = True) -> dict[str, Page]:
        machines, outcome = state.machines, state.outcome
        not_seen = why_stale or (unseen(outcome.facts) if outcome else "")
        if why_stale:
            machines, outcome = tuple(without_evidence(machine, why_stale) for machine in machines), None
        view = View(
            version=__version__,
            machines=machines,
            outcome=outcome,
            observed=state.observed,
            config_good=state.config_good,
            config_loaded=state.config_loaded,
            wakeups=state.wakeups,
            discarded=discarded(),
            stuck=len(stuck()),
        )
        pages = health.pages(machines, alive, not_seen, state.notes)
        pages["/"] = front_page(os.uname().nodename, self._knowledge(state, why_stale), machines, outcome)
        for key, accept in (("/metrics", TEXT), ("/metrics" + OPENMETRICS_KEY, OPENMETRICS)):
            pages[key] = self._metrics.page(view, accept)
        return pages
