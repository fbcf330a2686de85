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
from types import FrameType
from typing import Protocol, TextIO

from msgspec import Struct

from agent import __version__
from agent.config.load import Loaded
from agent.host.daemon.gpu_errors import GpuErrors
from agent.host.daemon.health import Fixes, Pass, View, changes, host_changes, in_brief, status_line
from agent.host.daemon.metrics import Metrics, unseen
from agent.host.daemon.pages import publish
from agent.host.daemon.server import Endpoint, Server, listen_locally
from agent.host.daemon.wakeups import REPORTS, Wakeups, host_sources
from agent.host.reconcile import MachineOutcome, Outcome
from agent.host.state.locks import locked
from agent.host.state.records import SERVICE_STATES, ServiceState
from agent.host.vendors import HOST_VENDORS
from agent.model.errors import AgentError, ConfigChangedError, ConfigError
from agent.model.facts import Facts
from agent.model.goal import in_words
from agent.model.paths import INSTANCE_LOCK, RUNTIME, SERVICE_STATE, STATUSZ_SOCKET, TRIAL
from agent.model.text import one_line, rfc3339
from agent.system.deadlines import stuck
from agent.system.files import System
from agent.system.journal_fields import JournalHandler
from agent.system.process import host_runner
from agent.system.trust import discarded

log = logging.getLogger(__name__)


class Attempt(Struct):
    """How a piece of work ended."""

    error: Exception | None = None
    """Why it failed; None if it did not."""

    @property
    def unexpected(self) -> Exception | None:
        """The error, if it is none that the agent raises or handles: the log has its traceback."""
        return None if isinstance(self.error, AgentError | OSError) else self.error

    @property
    def why(self) -> str:
        return in_words(self.unexpected) if self.unexpected else str(self.error)


@contextlib.contextmanager
def attempt() -> Iterator[Attempt]:
    """Catch any error of the block: the service continues, because a restarted one would meet the same error."""
    made = Attempt()
    try:
        yield made
    except Exception as error:
        made.error = error


class EventLog:
    """Logs each failure, problem and condition change once, and again only if it was gone and has come back."""

    def __init__(self) -> None:
        self.last_failures: tuple[str, ...] = ()
        self._said: dict[str, tuple[str, ...]] = {}
        """The sentences that were true last, by what they are about."""
        self._machines: dict[str, MachineOutcome] = {}
        self._facts: Facts | None = None

    def once(
        self, about: str, sentences: tuple[str, ...], level: int = logging.ERROR, cause: Exception | None = None
    ) -> None:
        """Log the sentences that were not true last, with the traceback of `cause`."""
        for sentence in sentences:
            if sentence not in self._said.get(about, ()):
                log.log(level, "%s", one_line(sentence), exc_info=cause)
        self._said[about] = sentences

    def ended(self, failures: tuple[str, ...], cause: Exception | None = None) -> None:
        """Log the failures of a pass. If the previous pass had failures and this one has none, log that."""
        self.once("failures", failures, cause=cause)
        if self.last_failures and not failures:
            log.info("recovered: the last pass had no failure")
        self.last_failures = failures

    def outcome(self, outcome: Outcome) -> None:
        """Log what is new in the outcome of a pass."""
        self.ended(outcome.failures)
        self.once("problems", outcome.facts.all_problems(), logging.WARNING)
        for machine in outcome.machines:
            for level, sentence, fields in changes(machine, self._machines.get(machine.name)):
                log.log(level, "%s", sentence, extra={"fields": fields})
        self._machines = {machine.name: machine for machine in outcome.machines}
        for level, sentence, fields in host_changes(outcome.facts, self._facts):
            log.log(level, "%s", sentence, extra={"fields": fields})
        self._facts = outcome.facts

    @contextlib.contextmanager
    def guarded(self, work: str) -> Iterator[None]:
        """Log any error of the block, and suppress it: other work must go on.

        An error that comes back at each attempt is logged once. `work` completes the sentence "cannot ...".
        """
        with attempt() as made:
            yield
        self.once(work, (f"cannot {work}: {made.why}",) if made.error else (), cause=made.unexpected)


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


def log_to(stream: TextIO) -> None:
    """Write the agent's log to the journal if `stream` is connected to it, else to `stream`."""
    logger = logging.getLogger("agent")
    logger.handlers[:] = [JournalHandler(stream)]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class PassInterruptedError(BaseException):
    """The grace period after SIGTERM or SIGINT expired in a pass or reload. `except Exception` does not catch it."""


class Signals:
    """Handles SIGHUP, SIGTERM and SIGINT, which end the loop's wait. Create only one object.

    SIGTERM and SIGINT also end a pass or a reload, after a grace period.
    """

    def __init__(self, notifier: Notifier, grace: float) -> None:
        self.reload = self.stop = self._in_pass = False
        self._notifier, self._grace = notifier, grace
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)
        # The interpreter's C handler writes to this socket, so no signal is lost between checking a flag and waiting.
        signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self._on_signal)

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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.reload = True
        elif number == signal.SIGALRM:
            if self._in_pass:
                raise PassInterruptedError
        elif not self.stop:
            # Later signals do not begin the grace period again.
            self.stop = True
            self._notifier.send("STOPPING=1")
            signal.setitimer(signal.ITIMER_REAL, self._grace)


INTERNAL_ERROR = 70
"""The exit code that gives up a release on trial: its unit then runs the former one (deploy/debian/trial)."""

Progress = Callable[[str], None]

PASSES = 20
"""How many passes are remembered: enough for all passes after one event, and some earlier ones."""
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


Fix = Callable[[Loaded, Outcome], Fixes]
"""Returns the commands that fix what an outcome's conditions show."""
Begin = Callable[[Loaded, Outcome], tuple[str, ...]]
"""Begins the resets and tests of GPUs that are due. Returns what is stopped, and why, in sentences."""


class Timing(Struct, frozen=True):
    """Intervals and limits in seconds."""

    interval: float = 60.0
    pending: float = 5.0
    """Delay between passes while a machine is pending (agent.host.reconcile), if reports are not watched."""
    pending_watched: float = 15.0
    """The same delay if reports are watched. Passes are still needed, because some changes cause no event."""
    pending_limit: float = 120.0
    """After this time, a machine is not waited for any longer: one without the machine half never answers."""
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
        system: System,
        fix: Fix = lambda *_: {},
        begin: Begin = lambda *_: (),
    ) -> None:
        self._load, self._make, self._notifier, self._timing, self._fix = load, make, notifier, timing, fix
        self._system, self._begin = system, begin
        self._state: ServiceState | None = None
        """What `doctor` reads of the service, as it was recorded last."""
        self._watchdog = watchdog_interval(os.environ)
        self._event_log, self._metrics = EventLog(), Metrics()
        with self._event_log.guarded(f"remove {SERVICE_STATE}, which an earlier service wrote"):
            system.remove(SERVICE_STATE)
        self._gpu_errors = GpuErrors(system, self._metrics.gpu_error)
        sources = host_sources(system, HOST_VENDORS, lambda: self.loaded.config.driver, self._gpu_errors.receive)
        self._wakeups = Wakeups((*sources, self._gpu_errors))
        self.loaded = loaded = load()
        self._reconciler = self._make(loaded, self._progress)
        self._passes: deque[Pass] = deque(maxlen=PASSES)
        self.view = View(
            __version__,
            (),
            why_stale="the first pass has not finished",
            config_good=not loaded.rejected,
            config_loaded=time.time(),
            passes=self._passes,
        )
        self._log_rejected(loaded.rejected)
        self._endpoint = Endpoint(loaded.config.metrics.address, listeners(os.environ))
        self.local = Server(listen_locally(system.full_path(RUNTIME), STATUSZ_SOCKET))
        self.failed_trial = False
        """The release is on trial, and an error that only the agent can cause keeps it from its work."""
        self._failed_in_a_row = 0
        self._progress_reported = 0.0
        self._pending_since: dict[str, float] = {}
        """Since when machines are pending, by CLOCK_MONOTONIC."""
        self._is_pending = False
        """Whether the last pass left a machine pending, for less than the limit."""
        self._publish()

    def loop(self, signals: Signals) -> int:
        """Run until SIGTERM or SIGINT, or until a release on trial fails. Return the exit code."""
        ready, trigger = False, "start"
        self._wakeups.open()
        while True:
            signals.drain()
            if signals.stop:
                return 0
            reloading, signals.reload = signals.reload, False
            if reloading:
                trigger = "reload"
                with signals.in_pass():
                    self.reload()
            self._endpoint.listen()
            self.work(trigger, signals)
            if self.failed_trial:
                return INTERNAL_ERROR
            newly_ready = not ready and not self.view.why_stale
            ready = ready or newly_ready
            if newly_ready or (reloading and ready):
                self._notifier.send("READY=1")
            trigger, delay = self.next_pass()
            if signals.reload:
                # `work` asks for a reload without a signal, which would end the wait.
                continue
            if source := self._wakeups.wait(delay, signals.fileno()):
                trigger = source
                self._metrics.event(self._wakeups.first)

    def reload(self) -> None:
        """Read the configuration again. If the files are invalid, keep the one in use, or use a newer last good one."""
        self._notifier.send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        with attempt() as made:
            loaded = self._load()
            # If another process has saved a newer last good configuration, use that one: machines start with it.
            if loaded.rejected and (loaded.before == self.loaded.before or loaded.config == self.loaded.config):
                raise ConfigError(loaded.rejected)
            self._reconciler = self._make(loaded, self._progress)
            self.loaded, self.view.config_loaded = loaded, time.time()
        if made.error:
            # While the package is being upgraded, even the import of the validating modules may fail.
            lead = "cannot read the configuration: " if made.unexpected else ""
            self._reconciler.rejected = f"{lead}{made.why}"
        self._log_rejected(self._reconciler.rejected)
        with attempt() as moved:
            self._endpoint.move(self.loaded.config.metrics.address)
        if moved.error:
            log.error("metrics and health pages stay at their former address: %s", one_line(moved.why))
        self.view.config_good = not self._reconciler.rejected and not moved.error
        if self.view.config_good:
            log.info("configuration reloaded")
        self._metrics.reloaded(self.view.config_good)

    def _log_rejected(self, why: str) -> None:
        for line in why.splitlines():
            log.error("configuration rejected, using the last good one: %s", one_line(line))

    def work(self, trigger: str, signals: Signals) -> None:
        """Make one pass and report it."""
        self._notifier.send("WATCHDOG=1")
        started, view, actions = time.monotonic(), self.view, tuple[str, ...]()
        # Read the kernel log first, so that the pass sees which GPUs the log reports as lost.
        with self._event_log.guarded("follow GPU errors; each pass tries again"):
            self._gpu_errors.needs_pass()
        with attempt() as made:
            with signals.in_pass():
                outcome = self._reconciler.run_pass()
            view.outcome, view.why_stale, actions = outcome, "", outcome.sentences
            if not unseen(outcome.facts):
                view.observed = outcome.finished
            # The GPUs' addresses are needed, because each GPU's binding to a driver is saved with the position.
            with self._event_log.guarded("save the read position of /dev/kmsg; each pass tries again"):
                self._gpu_errors.save_position(gpu.pci_address for each in outcome.facts.vendors for gpu in each.gpus)
            self._event_log.outcome(outcome)
            with self._event_log.guarded("begin resets and tests of GPUs; each pass tries again"):
                self._event_log.once("GPUs", self._begin(self.loaded, outcome), logging.WARNING)
        if isinstance(made.error, ConfigChangedError):
            # A command, or the start of a machine, has read newer files: read them too before the next pass.
            signals.reload = True
            return
        if made.error:
            view.why_stale = f"the last pass failed: {made.why}"
            self._event_log.ended((view.why_stale,), made.unexpected)
        # What machines report may also cause errors, but in the first pass the former release has just read the same.
        faults = [] if made.error or self._passes else [each.fault for each in view.outcome.machines]
        if made.unexpected or (faults and all(faults)):
            with self._event_log.guarded(f"look for {TRIAL}"):
                self.failed_trial = self._system.exists(TRIAL)
        failures, seconds = self._event_log.last_failures, time.monotonic() - started
        self._metrics.passed(None if made.error else view.outcome, seconds)
        self._passes.append(Pass(rfc3339(time.time()), trigger, round(seconds, 3), actions, failures))
        self._failed_in_a_row = self._failed_in_a_row + 1 if failures else 0
        # Looked at once: between two looks, the limit may end.
        self._is_pending = self._pending()
        if not self._is_pending and not failures:
            self._metrics.converged()
        with self._event_log.guarded("publish the pages"):
            self._publish()
        status = view.why_stale or status_line(self._machines(), failures)
        unserved = self._endpoint.error
        self._notifier.status(f"no metrics: {unserved}; {status}" if unserved else status)
        unfinished, failed = (made.why, "") if made.error else ("", in_brief(failures))
        if (state := ServiceState(unserved, unfinished, failed)) != self._state:
            with self._event_log.guarded(f"write {SERVICE_STATE}"):
                SERVICE_STATES.write(SERVICE_STATE, state, self._system)
                self._state = state
        self._notifier.send("WATCHDOG=1")

    def next_pass(self) -> tuple[str, float]:
        """Return what triggers the next pass if no event or signal does, and in how many seconds."""
        timing = self._timing
        if self._failed_in_a_row:
            trigger, delay = "retry", min(timing.interval, timing.back_off * 2 ** min(self._failed_in_a_row - 1, 10))
        elif self._is_pending:
            watched = self._wakeups.tallies[REPORTS].watching
            trigger, delay = "pending", timing.pending_watched if watched else timing.pending
        else:
            trigger, delay = "timer", timing.interval
        if self._watchdog:
            delay = min(delay, self._watchdog * WATCHDOG_SHARE)
        return trigger, delay * random.uniform(1 - timing.jitter, 1 + timing.jitter)

    def _pending(self) -> bool:
        """Return whether a machine is pending, and has been for less than the limit."""
        now, before = time.monotonic(), self._pending_since
        self._pending_since = {each.name: before.get(each.name, now) for each in self._machines() if each.pending}
        return any(now - since < self._timing.pending_limit for since in self._pending_since.values())

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

    def _machines(self) -> tuple[MachineOutcome, ...]:
        """Return every configured machine. A machine that no pass has evaluated yet has no conditions."""
        outcome = self.view.outcome
        evaluated = {machine.name: machine for machine in outcome.machines} if outcome else {}
        return tuple(evaluated.get(name) or MachineOutcome(name, ()) for name in sorted(self.loaded.config.machines))

    def _publish(self) -> None:
        view, error = self.view, self._gpu_errors.error
        view.machines, view.written = self._machines(), time.time()
        view.discarded, view.stuck = discarded(), stuck()
        view.wakeups = tuple(self._wakeups.tallies.values())
        view.notes = (
            (not error, "kernel-log", error or "ok"),
            *((False, "stuck", what) for what in view.stuck),
            *((True, f"gpu {address}", text) for address, text in sorted(self._gpu_errors.last.items())),
        )
        view.fixes = {}
        if view.outcome:
            with self._event_log.guarded("name the commands that fix faults"):
                view.fixes = self._fix(self.loaded, view.outcome)
        publish(view, self._endpoint, self.local, self._metrics, self._timing.evidence, self._event_log.guarded)


def run(
    load: Callable[[], Loaded],
    make: Callable[[Loaded, Progress], Passes],
    timing: Timing | None = None,
    system: System | None = None,
    fix: Fix = lambda *_: {},
    begin: Begin = lambda *_: (),
) -> int:
    """Run the service until SIGTERM or SIGINT, and return the exit code. Raises AgentError if it cannot start.

    `make` gets a function that reports progress. The page for people shows what `fix` returns.
    """
    faulthandler.enable()  # The watchdog's SIGABRT then writes the stack of each thread to the journal.
    log_to(sys.stderr)
    timing, system = timing or Timing(), system or System(host_runner)
    notifier = Notifier(os.environ.get("NOTIFY_SOCKET", ""))
    with locked(system, INSTANCE_LOCK, 0, "another unbounded-agent already serves this host"):
        daemon = Daemon(load, make, notifier, timing, system, fix, begin)
        signals = Signals(notifier, timing.grace)
        try:
            return daemon.loop(signals)
        except PassInterruptedError:
            log.warning("interrupted during a pass; the next start continues it")
    return 0
