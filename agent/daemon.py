"""The service: passes on start, on events, on SIGHUP and by a slow timer, in one thread; told to systemd and HTTP."""

import faulthandler
import logging
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agent import __version__, health, statusz
from agent.config import Config
from agent.errors import AgentError
from agent.gauges import View
from agent.gpu_errors import GpuErrors
from agent.handoff import one_line
from agent.judgement import rfc3339
from agent.locks import locked
from agent.metrics import OPENMETRICS, TEXT, Metrics, unseen, without_evidence
from agent.notify import Notifier, log_to, watchdog_interval
from agent.paths import INSTANCE_LOCK, RUNTIME, STATUSZ_SOCKET
from agent.reconcile import MachineOutcome, Outcome
from agent.server import OPENMETRICS as OPENMETRICS_KEY
from agent.server import Endpoint, LocalServer, Page, Site
from agent.signals import BrokenOffError, Signals
from agent.statusz import PASSES, Knowledge, Pass
from agent.system.deadlines import stuck
from agent.system.files import System
from agent.system.host_runner import host_runner
from agent.telling import Telling
from agent.vendors.host import HOST_VENDORS
from agent.wakeups import Wakeups
from agent.wakeups.host import REPORTS, host_sources

log = logging.getLogger("agent.daemon")


Progress = Callable[[str], None]

PROGRESS_INTERVAL = 1.0
"""Seconds between two signs of life of the same step: a driver has a hundred files."""
WATCHDOG_SHARE = 5 / 12
"""Of the watchdog's time, between two passes. With the jitter, a minute in which the service is stopped fits in too."""
START_STEP = 120
"""Seconds that systemd waits for the next step of a start, the watchdog's."""


class Passes(Protocol):
    """What the loop needs of agent.reconcile.Reconciler."""

    def run_pass(self) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds."""

    interval: float = 60.0
    pending: float = 5.0
    """Between passes while a machine has not answered its handoff, if no event would tell of its answer."""
    pending_watched: float = 15.0
    """The same, where reports are watched: what else an answer waits for has no event."""
    pending_limit: float = 120.0
    """From then on `interval` holds: an image without our half never answers."""
    back_off: float = 5.0
    """After a failure; doubled for each further one, up to `interval`."""
    jitter: float = 0.1
    """Share by which a delay varies, so that hosts that booted together do not work together."""
    grace: float = 5.0
    """That a pass may go on after SIGTERM, before it is broken off."""

    @property
    def evidence(self) -> float:
        """How long an observation counts, and a pass may take."""
        return 3 * self.interval


class Daemon:
    """The loop and what it knows."""

    def __init__(
        self,
        load: Callable[[], Config],
        make: Callable[[Config, Progress], Passes],
        notifier: Notifier,
        timing: Timing,
        gpu_errors: GpuErrors,
        wakeups: Wakeups,
        local: LocalServer,
    ) -> None:
        self._load, self._make, self._notifier, self._timing = load, make, notifier, timing
        self._wakeups = wakeups
        self._watchdog = watchdog_interval(os.environ)
        self._metrics = Metrics()
        self._metrics.convergence.sources(tally.name for tally in wakeups.tallies)
        self._gpu_errors = gpu_errors
        gpu_errors.counted = self._metrics.gpu_error
        self.config = load()
        self._config_loaded, self._config_good = time.time(), True
        self._reconciler = self._make(self.config, self._progress)
        self._endpoint, self._local = Endpoint(self.config.metrics.address), local
        self._outcome: Outcome | None = None
        self._observed = 0.0
        self._why_not = "the first observation is not done"
        """Why nothing fresh is known; empty after a pass that came to an end."""
        self._telling = Telling()
        self._passes: deque[Pass] = deque(maxlen=PASSES)
        self._failed_in_a_row = 0
        self._told_progress = 0.0
        self._pending_since: float | None = None
        self._publish()

    def loop(self, signals: Signals) -> None:
        """Until SIGTERM."""
        ready, trigger = False, "start"
        self._wakeups.open()
        while not signals.stop:
            reloading, signals.reload = signals.reload, False
            if reloading:
                trigger = "reload"
                self.reload()
            self._endpoint.listen()
            self.work(trigger, signals)
            if not self._why_not and not ready:
                ready = True
                self._notifier.send("READY=1")
            elif reloading and ready:
                self._notifier.send("READY=1")
            if not signals.stop:
                trigger, delay = self.next()
                if source := self._wakeups.wait(delay, signals):
                    trigger = source
                    self._metrics.convergence.begin(source, self._wakeups.first)

    def reload(self) -> None:
        """Read the configuration again; one that is wrong, or whose address cannot be had, changes nothing."""
        self._notifier.send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        try:
            config = self._load()
            reconciler = self._make(config, self._progress)
            self._endpoint.move(config.metrics.address)
        except AgentError as error:
            self._config_good = False
            for line in str(error).splitlines():
                log.error("the configuration stays as it was: %s", one_line(line))
        else:
            self.config, self._reconciler = config, reconciler
            self._config_loaded, self._config_good = time.time(), True
            log.info("configuration read again")
        self._metrics.reloaded(self._config_good)

    def work(self, trigger: str, signals: Signals) -> None:
        """One pass, then tell of it."""
        self._notifier.send("WATCHDOG=1")
        started = time.monotonic()
        # Before the pass, which then sees what is kept of a lost GPU.
        self._gpu_errors.read()
        try:
            with signals.in_pass():
                outcome = self._reconciler.run_pass()
        except (AgentError, OSError) as error:
            self._metrics.failed(trigger, time.monotonic() - started)
            self._why_not = f"the last pass failed: {error}"
            self._telling.failures((self._why_not,))
            actions: tuple[str, ...] = ()
        else:
            self._metrics.passed(trigger, outcome)
            self._outcome, self._why_not = outcome, ""
            if not unseen(outcome.facts):
                self._observed = outcome.finished
            self._gpu_errors.keep(gpu.pci_address for vendor in outcome.facts.vendors for gpu in vendor.gpus)
            self._telling.outcome(outcome)
            actions = outcome.actions
        failures, seconds = self._telling.failed, round(time.monotonic() - started, 3)
        self._passes.append(Pass(rfc3339(time.time()), trigger, seconds, actions, failures))
        self._failed_in_a_row = self._failed_in_a_row + 1 if failures else 0
        if not failures and not self._pending:
            self._metrics.convergence.end()
        self._publish()
        status = self._why_not or health.status_line(self._machines())
        why_not = self._endpoint.why_not
        self._notifier.status(f"no metrics: {why_not}; {status}" if why_not else status)
        self._notifier.send("WATCHDOG=1")

    def next(self) -> tuple[str, float]:
        """What starts the next pass if no event or signal does, and in how many seconds."""
        timing, now = self._timing, time.monotonic()
        if not self._pending:
            self._pending_since = None
        elif self._pending_since is None:
            self._pending_since = now
        if self._failed_in_a_row:
            trigger, delay = "retry", min(timing.interval, timing.back_off * 2 ** min(self._failed_in_a_row - 1, 10))
        elif self._pending_since is not None and now - self._pending_since < timing.pending_limit:
            watched = self._wakeups.watches(REPORTS)
            trigger, delay = "pending", timing.pending_watched if watched else timing.pending
        else:
            trigger, delay = "timer", timing.interval
        if self._watchdog:
            delay = min(delay, self._watchdog * WATCHDOG_SHARE)
        return trigger, delay * random.uniform(1 - timing.jitter, 1 + timing.jitter)

    @property
    def _pending(self) -> bool:
        return any(machine.pending for machine in self._machines())

    def _progress(self, sentence: str) -> None:
        """A step of a pass begins, or (no text) goes on: the only sign of life within a pass."""
        if sentence:
            log.info("%s", one_line(sentence))
            self._notifier.status(sentence)
        elif time.monotonic() - self._told_progress < PROGRESS_INTERVAL:
            return
        self._told_progress = time.monotonic()
        # A first pass that copies a whole driver from a slow disk may take longer than TimeoutStartSec=.
        self._notifier.send("WATCHDOG=1", f"EXTEND_TIMEOUT_USEC={START_STEP * 1_000_000}")

    def _notes(self) -> tuple[health.Check, ...]:
        """What /readyz?verbose says besides, and what decides nothing."""
        why_not = self._gpu_errors.why_not
        last = tuple((True, f"gpu {address}", text) for address, text in sorted(self._gpu_errors.last.items()))
        hanging = tuple((False, "stuck", what) for what in stuck())
        return ((not why_not, "kernel-log", why_not or "ok"), *hanging, *last)

    def _machines(self) -> tuple[MachineOutcome, ...]:
        """Every configured machine, as far as it is known."""
        known = {machine.name: machine for machine in self._outcome.machines} if self._outcome else {}
        return tuple(known.get(name) or MachineOutcome(name, ()) for name in sorted(self.config.machines))

    def _publish(self) -> None:
        """Give the servers both editions: as it is now, and for when no pass ends in time."""
        too_long = f"no pass has ended for {self._timing.evidence:.0f} s"
        fresh, stale = self._edition(alive=True, why_not=self._why_not), self._edition(alive=False, why_not=too_long)
        until = time.monotonic() + self._timing.evidence
        self._endpoint.publish(Site(fresh, stale, until))
        self._local.site = Site(
            fresh | {"/statusz": self._statusz(self._why_not)}, stale | {"/statusz": self._statusz(too_long)}, until
        )

    def _statusz(self, why_not: str) -> Page:
        found = Knowledge(__version__, time.time(), why_not, self._passes, self._wakeups.tallies, stuck())
        return statusz.page(found, self._machines(), self._outcome.facts if self._outcome else None)

    def _edition(self, alive: bool, why_not: str) -> dict[str, Page]:
        machines = self._machines()
        if why_not:
            machines = tuple(without_evidence(machine, why_not) for machine in machines)
        view = View(
            version=__version__,
            machines=machines,
            outcome=None if why_not else self._outcome,
            observed=self._observed,
            config_good=self._config_good,
            config_loaded=self._config_loaded,
            wakeups=self._wakeups.tallies,
            stuck=len(stuck()),
        )
        not_seen = why_not or (unseen(self._outcome.facts) if self._outcome else "")
        pages = health.pages(machines, alive, not_seen, self._notes())
        for key, accept in (("/metrics", TEXT), ("/metrics" + OPENMETRICS_KEY, OPENMETRICS)):
            pages[key] = self._metrics.page(view, accept)
        return pages


def run(
    load: Callable[[], Config],
    make: Callable[[Config, Progress], Passes],
    timing: Timing | None = None,
    system: System | None = None,
) -> int:
    """Serve until SIGTERM; `make` gets what a pass is to call at each step.

    Raises AgentError when it cannot start: another agent, or the configuration.
    """
    # The watchdog's SIGABRT shows in the journal where each thread was.
    faulthandler.enable()
    log_to(sys.stderr)
    timing, system = timing or Timing(), system or System(host_runner)
    notifier = Notifier(os.environ.get("NOTIFY_SOCKET", ""))
    busy = "another unbounded-agent serves this host"
    with locked(system, INSTANCE_LOCK, 0, busy):
        gpu_errors = GpuErrors(system)
        wakeups = Wakeups((*host_sources(system, HOST_VENDORS, lambda: daemon.config.driver), gpu_errors))
        local = LocalServer(system.place(RUNTIME), STATUSZ_SOCKET)
        daemon = Daemon(load, make, notifier, timing, gpu_errors, wakeups, local)
        signals = Signals(notifier, timing.grace)
        try:
            daemon.loop(signals)
        except BrokenOffError:
            log.warning("stopped in the middle of a pass; the next start goes on")
    return 0
