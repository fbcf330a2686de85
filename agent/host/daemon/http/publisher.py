"""Prepares all pages after each pass: a set to serve now, and a set to serve once the first one is too old."""

import os
import time

from msgspec.structs import replace

from agent.host.daemon.http import health, statusz
from agent.host.daemon.http.endpoint import Endpoint
from agent.host.daemon.http.front_page import front_page
from agent.host.daemon.http.local_server import LocalServer
from agent.host.daemon.http.metrics import OPENMETRICS, TEXT, Metrics, unseen, without_evidence
from agent.host.daemon.http.server import OPENMETRICS as OPENMETRICS_KEY
from agent.host.daemon.http.server import Page, Site
from agent.host.daemon.http.view import View


class Publisher:
    """Gives pages to both servers."""

    def __init__(self, endpoint: Endpoint, local: LocalServer, metrics: Metrics, evidence: float) -> None:
        """`evidence` is how long an observation counts as fresh, in seconds."""
        self._endpoint, self._local, self._metrics, self._evidence = endpoint, local, metrics, evidence

    def publish(self, view: View) -> None:
        """Prepare two sets of pages: the current one, and one to serve if no pass ends in time."""
        late = replace(view, why_stale=f"no pass has ended for {self._evidence:.0f} s")
        fresh, stale = self._pages(view), self._pages(late, alive=False)
        until = time.monotonic() + self._evidence
        self._endpoint.publish(Site(fresh, stale, until))
        self._local.site = Site(
            fresh | {"/statusz": statusz.page(view)}, stale | {"/statusz": statusz.page(late)}, until
        )

    def _pages(self, view: View, *, alive: bool = True) -> dict[str, Page]:
        not_seen = view.why_stale or (unseen(view.outcome.facts) if view.outcome else "")
        if view.why_stale:
            machines = tuple(without_evidence(machine, view.why_stale) for machine in view.machines)
            view = replace(view, machines=machines, outcome=None)
        pages = health.pages(view.machines, alive, not_seen, view.notes)
        pages["/"] = front_page(os.uname().nodename, view)
        for key, accept in (("/metrics", TEXT), ("/metrics" + OPENMETRICS_KEY, OPENMETRICS)):
            pages[key] = self._metrics.page(view, accept)
        return pages
