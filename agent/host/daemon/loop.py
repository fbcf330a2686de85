"""The service: makes passes at its start, after events, on SIGHUP and on a slow timer, in one thread."""

import contextlib
import faulthandler
import logging
import os
import random
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Protocol, TextIO

from msgspec import Struct

from agent import __version__
from agent.config.load import Loaded
from agent.config.settings import Config
from agent.host.daemon import health
from agent.host.daemon.gpu_errors import GpuErrors
from agent.host.daemon.health import PASSES, Fixes, Pass, View
from agent.host.daemon.metrics import Metrics, unseen
from agent.host.daemon.pages import publish
from agent.host.daemon.server import Endpoint, Server, listen_locally
from agent.host.daemon.wakeups import REPORTS, Wakeups, host_sources
from agent.host.reconcile import MachineOutcome, Outcome
from agent.host.state.locks import locked
from agent.host.state.records import SERVICE_STATES, ServiceState
from agent.host.vendors import HOST_VENDORS
from agent.model.conditions import Condition, ConditionType
from agent.model.errors import AgentError, ConfigChangedError, ConfigError
from agent.model.goal import fault, in_words
from agent.model.paths import INSTANCE_LOCK, RUNTIME, SERVICE_STATE, STATUSZ_SOCKET
from agent.model.text import one_line, rfc3339
from agent.system.deadlines import stuck
from agent.system.files import System
from agent.system.process import host_runner
from agent.system.trust import discarded

log = logging.getLogger(__name__)


class EventLog:
    """Logs each failure, problem and condition change once, and again only if it was gone and has come back."""

    def __init__(self) -> None:
        self.last_failures: tuple[str, ...] = ()
        self._problems: tuple[str, ...] = ()
        self._conditions: dict[str, dict[ConditionType, Condition]] = {}
        self._faults: dict[str, str] = {}
        """By piece of work: why the last attempt at it failed. Work whose last attempt succeeded is not listed."""

    def rejected(self, why: str) -> None:
        """Log why the configuration is invalid. If it is valid, `why` is empty, and nothing is logged."""
        for line in why.splitlines():
            log.error("configuration rejected, using the last good one: %s", one_line(line))

    def outcome(self, outcome: Outcome) -> None:
        """Log what is new in the outcome of a pass."""
        self.failures(outcome.failures)
        problems = outcome.facts.all_problems()
        for sentence in problems:
            if sentence not in self._problems:
                log.warning("%s", one_line(sentence))
        self._problems = problems
        for machine in outcome.machines:
            for level, sentence in health.changes(machine, self._conditions.get(machine.name, {})):
                log.log(level, "%s", sentence)
        self._conditions = {
            machine.name: {each.type: each for each in machine.conditions} for machine in outcome.machines
        }

    def unfinished(self, error: Exception) -> str:
        """Log why a pass did not finish, with the traceback if the error is unexpected. Return the reason."""
        expected = isinstance(error, AgentError | OSError)
        why = str(error) if expected else in_words(error)
        self.failures((f"the last pass failed: {why}",), None if expected else error)
        return why

    def failures(self, failures: tuple[str, ...], cause: Exception | None = None) -> None:
        """Log the failures that the previous pass did not have, with the traceback of `cause`.

        If the previous pass had failures and this one has none, log that.
        """
        for sentence in failures:
            if sentence not in self.last_failures:
                log.error("%s", one_line(sentence), exc_info=cause)
        if self.last_failures and not failures:
            log.info("recovered: the last pass had no failure")
        self.last_failures = failures

    @contextlib.contextmanager
    def guarded(self, work: str) -> Iterator[None]:
        """Log any error of the block with its traceback, and suppress it: other work must go on.

        An error that comes back at each attempt is logged once. `work` completes the sentence "cannot ...".
        """
        try:
            yield
        except Exception as error:
            why = fault(work, error).why
            if self._faults.get(work) != why:
                log.error("%s", why, exc_info=error)
            self._faults[work] = why
        else:
            self._faults.pop(work, None)


def why_not_read(error: Exception) -> str:
    """Return why the configuration could not be read or used."""
    return str(error) if isinstance(error, AgentError) else fault("read the configuration", error).why


PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
"""Levels of syslog(3), which precede a line as `<N>` (sd-daemon(3))."""
STATUS_LIMIT = 500
"""Characters of STATUS=, which `systemctl status` shows in one line."""


FIRST_PASSED = 3
"""The first file descriptor that systemd passes (SD_LISTEN_FDS_START)."""


class Notifier:
    """Sends messages to the service manager. Without an address, it does nothing."""

    def __init__(self, address: str = "") -> None:
        """Set the address as in $NOTIFY_SOCKET: a path, or `@` and a name in the abstract namespace."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    def send(self, *assignments: str) -> None:
        """Send one datagram of `NAME=value` lines. Ignores errors."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
            s.settimeout(1.0)
            s.sendto("\n".join(assignments).encode(), self._address)

    def status(self, sentence: str) -> None:
        """Set the line that `systemctl status` shows."""
        self.send("STATUS=" + one_line(sentence)[:STATUS_LIMIT])


def watchdog_interval(environment: Mapping[str, str]) -> float:
    """Return the seconds within which systemd expects a sign of life (sd_watchdog_enabled(3)); 0 if it expects none."""
    microseconds, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(microseconds) / 1e6


def listeners(environment: Mapping[str, str]) -> tuple[socket.socket, ...]:
    """Return the listening stream sockets that systemd passed to this process (sd_listen_fds(3)).

    Other sockets that systemd passed are closed. Call this function only once, because each call would return objects
    for the same descriptors.
    """
    pid, count = environment.get("LISTEN_PID", ""), environment.get("LISTEN_FDS", "")
    if pid != str(os.getpid()) or not count.isdecimal():
        return ()
    sockets = []
    for descriptor in range(FIRST_PASSED, FIRST_PASSED + int(count)):
        try:
            passed = socket.socket(fileno=descriptor)
        except OSError:
            log.warning("file descriptor %d, which systemd passed, is not a socket", descriptor)
            continue
        if passed.type is socket.SOCK_STREAM and passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            passed.set_inheritable(False)
            passed.setblocking(True)
            sockets.append(passed)
        else:
            log.warning("the socket %d, which systemd passed, is not one that accepts connections", descriptor)
            passed.close()
    return tuple(sockets)


class PriorityFormatter(logging.Formatter):
    """Puts the priority before each line, because the journal treats each line as a separate message."""

    def format(self, record: logging.LogRecord) -> str:
        priority = PRIORITIES.get(record.levelno, 6)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def log_to(stream: TextIO) -> None:
    """Write the agent's log to `stream`. If `stream` is a terminal, leave out the priorities."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter() if stream.isatty() else PriorityFormatter())
    logger = logging.getLogger("agent")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class PassInterruptedError(BaseException):
    """The grace period after SIGTERM or SIGINT expired in a pass or reload. `except Exception` does not catch it."""


class Signals:
    """Handles SIGHUP, SIGTERM and SIGINT, which end the loop's wait. Create only one object.

    SIGTERM and SIGINT also end a pass or a reload, after a grace period.
    """

    def __init__(self, notifier: Notifier, grace: float) -> None:
        self.reload = False
        self.stop = False
        self._notifier, self._grace = notifier, grace
        self._in_pass = False
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)
        # The interpreter's C handler writes to this socket, so no signal is lost between checking a flag and waiting.
        signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGHUP, self._on_reload)
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGALRM, self._on_grace_over)

    @property
    def pending(self) -> bool:
        """Whether the loop must stop waiting."""
        return self.stop or self.reload

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a signal arrives."""
        return self._reading.fileno()

    def drain(self) -> None:
        """Make the descriptor unreadable again. Call this before checking the flags."""
        with contextlib.suppress(BlockingIOError):
            self._reading.recv(4096)

    @contextlib.contextmanager
    def in_pass(self) -> Iterator[None]:
        """If the grace period ends while the block runs, raise PassInterruptedError in the block.

        The interruption leaves no half-written file, because files are written atomically. A reload is such a block
        too, because a file of the configuration may be on a disk that does not answer.
        """
        self._in_pass = True
        try:
            yield
        finally:
            self._in_pass = False

    def _on_reload(self, number: int, frame: FrameType | None) -> None:
        self.reload = True

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            # An earlier signal has begun the grace period. Do not begin it again.
            return
        self.stop = True
        self._notifier.send("STOPPING=1")
        signal.setitimer(signal.ITIMER_REAL, self._grace)

    def _on_grace_over(self, number: int, frame: FrameType | None) -> None:
        if self._in_pass:
            raise PassInterruptedError


Progress = Callable[[str], None]

PROGRESS_INTERVAL = 1.0
"""Minimum seconds between two signs of life in a step, which may have hundreds of parts, such as a driver's files."""
WATCHDOG_SHARE = 5 / 12
"""The longest delay between passes, before jitter, as a share of the watchdog's interval. The rest of the interval
is more than a minute, so systemd does not kill a process that was suspended for a minute."""
START_STEP = 120
"""Seconds that systemd waits for the next sign of life during the start. The watchdog's interval is equally long."""


class Passes(Protocol):
    """The part of agent.host.reconcile.Reconciler that the loop needs."""

    rejected: str
    """What is wrong with the configuration files, if the last good configuration is in force; otherwise empty."""

    def run_pass(self) -> Outcome: ...


Fix = Callable[[Config, Outcome], Fixes]
"""Returns the commands that fix what an outcome's conditions show."""


class Timing(Struct, frozen=True):
    """Intervals and limits in seconds."""

    interval: float = 60.0
    pending: float = 5.0
    """Delay between passes while a machine is pending (agent.host.reconcile), if reports are not watched."""
    pending_watched: float = 15.0
    """The same delay if reports are watched. Passes are still needed, because some changes cause no event."""
    pending_limit: float = 120.0
    """After this time, `interval` applies again: an image without the machine half never answers its handoff."""
    back_off: float = 5.0
    """Delay after a failed pass. Each further failure doubles it, up to `interval`."""
    jitter: float = 0.1
    """Share by which delays vary at most, so that hosts that booted together do not all work at the same time."""
    grace: float = 5.0
    """How long a pass may continue after SIGTERM before it is interrupted."""

    @property
    def evidence(self) -> float:
        """How long an observation counts as fresh. If no pass ends for this long, /livez and /healthz report that."""
        return 3 * self.interval


class Daemon:
    """The loop and its state."""

    def __init__(
        self,
        load: Callable[[], Loaded],
        make: Callable[[Loaded, Progress], Passes],
        notifier: Notifier,
        timing: Timing,
        gpu_errors: GpuErrors,
        wakeups: Wakeups,
        local: Server,
        fix: Fix = lambda *_: {},
        record: Callable[[ServiceState], None] = lambda _: None,
    ) -> None:
        self._fix, self._record = fix, record
        self._state: ServiceState | None = None
        """What was recorded last."""
        self._load, self._make, self._notifier, self._timing = load, make, notifier, timing
        self._wakeups = wakeups
        self._watchdog = watchdog_interval(os.environ)
        self._metrics = Metrics()
        self._gpu_errors = gpu_errors
        gpu_errors.counted = self._metrics.gpu_error
        self._event_log = EventLog()
        loaded = load()
        self.config, self._before = loaded.config, loaded.before
        self._config_good, self._config_loaded = not loaded.rejected, time.time()
        self._reconciler = self._make(loaded, self._progress)
        self._event_log.rejected(loaded.rejected)
        self._endpoint = Endpoint(self.config.metrics.address, listeners(os.environ))
        self._local = local
        self._outcome: Outcome | None = None
        self._observed = 0.0
        """When a pass last observed the devices of all vendors, in seconds since the epoch; 0 if none has."""
        self._why_stale = "the first pass has not finished"
        """Why there is no fresh observation; empty after a completed pass."""
        self._passes: deque[Pass] = deque(maxlen=PASSES)
        self._failed_in_a_row = 0
        self._progress_reported = 0.0
        self._pending_since: float | None = None
        self._publish()
        self._record_state(ServiceState())

    def loop(self, signals: Signals) -> None:
        """Run until SIGTERM or SIGINT."""
        ready, trigger = False, "start"
        self._wakeups.open()
        while not signals.stop:
            reloading, signals.reload = signals.reload, False
            if reloading:
                trigger = "reload"
                with signals.in_pass():
                    self.reload()
            self._endpoint.listen()
            self.work(trigger, signals)
            newly_ready = not ready and not self._why_stale
            ready = ready or newly_ready
            if newly_ready or (reloading and ready):
                self._notifier.send("READY=1")
            if not signals.stop:
                trigger, delay = self.next_pass()
                if source := self._wakeups.wait(delay, signals):
                    trigger = source
                    self._metrics.event(self._wakeups.first)

    def reload(self) -> None:
        """Read the configuration again. If the files are invalid, keep the one in use, or use a newer last good one."""
        self._notifier.send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        try:
            loaded = self._load()
            # If another process has saved a newer last good configuration, use that one: machines start with it.
            if loaded.rejected and (loaded.before == self._before or loaded.config == self.config):
                raise ConfigError(loaded.rejected)
            self._reconciler = self._make(loaded, self._progress)
        except Exception as error:
            # Any error: while the package is being upgraded, even the import of the validating modules may fail.
            self._reconciler.rejected = why_not_read(error)
        else:
            self.config, self._before, self._config_loaded = loaded.config, loaded.before, time.time()
        self._config_good = not self._reconciler.rejected
        self._event_log.rejected(self._reconciler.rejected)
        try:
            self._endpoint.move(self.config.metrics.address)
        except Exception as error:
            self._config_good = False
            log.error("metrics and health pages stay at their former address: %s", one_line(why_not_read(error)))
        if self._config_good:
            log.info("configuration reloaded")
        self._metrics.reloaded(self._config_good)

    def work(self, trigger: str, signals: Signals) -> None:
        """Make one pass and report it."""
        self._notifier.send("WATCHDOG=1")
        started, actions, unfinished = time.monotonic(), tuple[str, ...](), ""
        # Read the kernel log first, so that the pass sees which GPUs the log reports as lost.
        with self._event_log.guarded("follow GPU errors"):
            self._gpu_errors.read()
        try:
            with signals.in_pass():
                outcome = self._reconciler.run_pass()
            self._outcome, self._why_stale = outcome, ""
            if not unseen(outcome.facts):
                self._observed = outcome.finished
            # The GPUs' addresses are needed, because each GPU's binding to a driver is saved with the position.
            self._gpu_errors.save_position(gpu.pci_address for vendor in outcome.facts.vendors for gpu in vendor.gpus)
            self._event_log.outcome(outcome)
            self._metrics.passed(outcome)
            actions = outcome.sentences
        except ConfigChangedError:
            # A command, or the start of a machine, has read newer files: read them too before the next pass.
            signals.reload = True
            return
        except Exception as error:
            # The loop continues after any error, because a restarted service would meet the same error.
            self._metrics.failed(time.monotonic() - started)
            unfinished = self._event_log.unfinished(error)
            self._why_stale = f"the last pass failed: {unfinished}"
        failures, seconds = self._event_log.last_failures, round(time.monotonic() - started, 3)
        self._passes.append(Pass(rfc3339(time.time()), trigger, seconds, actions, failures))
        self._failed_in_a_row = self._failed_in_a_row + 1 if failures else 0
        if not failures and not self._pending:
            self._metrics.converged()
        with self._event_log.guarded("publish the pages"):
            self._publish()
        status = self._why_stale or health.status_line(self._machines(), failures)
        unserved = self._endpoint.error
        self._notifier.status(f"no metrics: {unserved}; {status}" if unserved else status)
        failed = "" if unfinished else health.in_brief(failures)
        self._record_state(ServiceState(unserved, unfinished, failed))
        self._notifier.send("WATCHDOG=1")

    def next_pass(self) -> tuple[str, float]:
        """Return what triggers the next pass if no event or signal does, and in how many seconds."""
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
        """Report that a step begins or, if `sentence` is empty, continues. A pass gives no other sign of life."""
        if sentence:
            log.info("%s", one_line(sentence))
            self._notifier.status(sentence)
        elif time.monotonic() - self._progress_reported < PROGRESS_INTERVAL:
            return
        self._progress_reported = time.monotonic()
        # The first pass may exceed TimeoutStartSec=, if it copies a whole driver from a slow disk.
        self._notifier.send("WATCHDOG=1", f"EXTEND_TIMEOUT_USEC={START_STEP * 1_000_000}")

    def _notes(self) -> tuple[health.Check, ...]:
        error = self._gpu_errors.error
        last = tuple((True, f"gpu {address}", text) for address, text in sorted(self._gpu_errors.last.items()))
        hanging = tuple((False, "stuck", what) for what in stuck())
        return ((not error, "kernel-log", error or "ok"), *hanging, *last)

    def _machines(self) -> tuple[MachineOutcome, ...]:
        """Return every configured machine. A machine that no pass has evaluated yet has no conditions."""
        evaluated = {machine.name: machine for machine in self._outcome.machines} if self._outcome else {}
        return tuple(evaluated.get(name) or MachineOutcome(name, ()) for name in sorted(self.config.machines))

    def _publish(self) -> None:
        view = View(
            version=__version__,
            machines=self._machines(),
            outcome=self._outcome,
            why_stale=self._why_stale,
            written=time.time(),
            observed=self._observed,
            config_good=self._config_good,
            config_loaded=self._config_loaded,
            passes=self._passes,
            wakeups=self._wakeups.tallies,
            notes=self._notes(),
            discarded=discarded(),
            fixes=self._fixes(),
            stuck=stuck(),
        )
        publish(view, self._endpoint, self._local, self._metrics, self._timing.evidence, self._event_log.guarded)

    def _record_state(self, state: ServiceState) -> None:
        """Record what `doctor` reads of the service, if that has changed."""
        if state != self._state:
            with self._event_log.guarded(f"write {SERVICE_STATE}"):
                self._record(state)
                self._state = state

    def _fixes(self) -> Fixes:
        if self._outcome:
            with self._event_log.guarded("name the commands that fix faults"):
                return self._fix(self.config, self._outcome)
        return {}


def run(
    load: Callable[[], Loaded],
    make: Callable[[Loaded, Progress], Passes],
    timing: Timing | None = None,
    system: System | None = None,
    fix: Fix = lambda *_: {},
) -> int:
    """Run the service until SIGTERM or SIGINT, and return the exit code. Raises AgentError if it cannot start.

    `make` gets a function that reports progress. The page for people shows what `fix` returns.
    """
    faulthandler.enable()  # The watchdog's SIGABRT then writes the stack of each thread to the journal.
    log_to(sys.stderr)
    timing, system = timing or Timing(), system or System(host_runner)
    notifier = Notifier(os.environ.get("NOTIFY_SOCKET", ""))
    busy = "another unbounded-agent already serves this host"
    with locked(system, INSTANCE_LOCK, 0, busy):
        gpu_errors = GpuErrors(system)
        wakeups = Wakeups((*host_sources(system, HOST_VENDORS, lambda: daemon.config.driver), gpu_errors))
        local = Server(listen_locally(system.full_path(RUNTIME), STATUSZ_SOCKET))
        record = partial(SERVICE_STATES.write, SERVICE_STATE, system=system)
        daemon = Daemon(load, make, notifier, timing, gpu_errors, wakeups, local, fix, record)
        signals = Signals(notifier, timing.grace)
        try:
            daemon.loop(signals)
        except PassInterruptedError:
            log.warning("interrupted during a pass; the next start continues it")
    return 0
