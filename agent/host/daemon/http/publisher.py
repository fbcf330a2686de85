"""Prepares all pages after each pass: a set to serve now, and a set to serve once the first set is too old."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from http import HTTPStatus

from msgspec.structs import replace

from agent.host.daemon.http import health, statusz
from agent.host.daemon.http.endpoint import Endpoint
from agent.host.daemon.http.front_page import front_page
from agent.host.daemon.http.local_server import LocalServer
from agent.host.daemon.http.metrics import OPENMETRICS, TEXT, Metrics, unseen, without_evidence
from agent.host.daemon.http.server import OPENMETRICS as OPENMETRICS_KEY
from agent.host.daemon.http.server import VERBOSE, Page, Site
from agent.host.daemon.http.view import View

Guard = Callable[[str], AbstractContextManager[None]]
"""Suppresses and logs errors of the work that completes the sentence "cannot ..."."""


class Publisher:
    """Gives pages to the endpoint and to the local server. Only the local server gets /statusz."""

    def __init__(
        self, endpoint: Endpoint, local: LocalServer, metrics: Metrics, evidence: float, guarded: Guard
    ) -> None:
        """Set the receivers of the pages. `evidence` is how long an observation counts as fresh, in seconds.

        If making a page fails, `guarded` logs the error, and the page says that it could not be made.
        """
        self._endpoint, self._local, self._metrics, self._evidence = endpoint, local, metrics, evidence
        self._guarded = guarded

    def publish(self, view: View) -> None:
        """Prepare two sets of pages: one to serve now, and one to serve if no pass ends for `evidence` seconds."""
        late = replace(view, why_stale=f"no pass has ended for {self._evidence:.0f} s")
        fresh, stale = self._pages(view), self._pages(late, alive=False)
        until = time.monotonic() + self._evidence
        self._endpoint.publish(Site(fresh, stale, until))
        fresh_statusz, stale_statusz = self._statusz(view), self._statusz(late, alive=False)
        self._local.site = Site(fresh | fresh_statusz, stale | stale_statusz, until)

    def _pages(self, view: View, *, alive: bool = True) -> dict[str, Page]:
        not_seen = view.why_stale or (unseen(view.outcome.facts) if view.outcome else "")
        if view.why_stale:
            machines = tuple(without_evidence(machine, view.why_stale) for machine in view.machines)
            view = replace(view, machines=machines, outcome=None, fixes={})
        pages = self._made("/livez", alive, partial(health.loop_pages, "/livez", alive))
        pages |= self._made("/healthz", alive, partial(health.loop_pages, "/healthz", alive))
        pages |= self._made("/readyz", alive, partial(health.host_pages, "/readyz", not_seen, view.notes))
        for machine in view.machines:
            path = f"/readyz/machines/{machine.name}"
            pages |= self._made(path, alive, partial(health.machine_pages, path, machine))
        pages |= self._made("/", alive, lambda: {"/": front_page(os.uname().nodename, view)})
        for path, accept in (("/metrics", TEXT), ("/metrics" + OPENMETRICS_KEY, OPENMETRICS)):
            pages |= self._made(path, alive, partial(self._metrics_page, path, view, accept))
        return pages

    def _metrics_page(self, path: str, view: View, accept: str) -> dict[str, Page]:
        return {path: self._metrics.page(view, accept)}

    def _statusz(self, view: View, *, alive: bool = True) -> dict[str, Page]:
        return self._made("/statusz", alive, lambda: {"/statusz": statusz.page(view)})

    def _made(self, path: str, alive: bool, make: Callable[[], dict[str, Page]]) -> dict[str, Page]:
        """Return the pages of one path. If `make` raises any error, the page says that it could not be made."""
        work = f"make the page {path}"
        text = f"cannot {work}: see `journalctl -u unbounded-agent`\n"
        page = Page(HTTPStatus.INTERNAL_SERVER_ERROR, text.encode())
        made = {path: page, path + VERBOSE: page}
        # A page is in both sets, and may fail in each for a different reason. So each set has its own name in the log.
        with self._guarded(work if alive else f"{work} for a time without passes"):
            made = make()
        return made
