"""Waits for events that require a pass before the loop's timer expires. Everything runs in the loop's thread.

The loop also works without any event source.
"""

import contextlib
import errno
import logging
import math
import os
import select
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Protocol

from msgspec import Struct

from agent.config.settings import DriverSettings
from agent.model.goal import in_words
from agent.model.handoff import SIZE_LIMIT
from agent.model.paths import MACHINED_STATE, MACHINES_RUNTIME, REPORT_NAME, RUNTIME, WAKE, report_directory
from agent.model.text import one_line, sha256
from agent.system import inotify, opening
from agent.system.devices import CONTROL, Event, Monitor, udev_monitor
from agent.system.files import System
from agent.vendors.host_vendor import HostVendor

log = logging.getLogger(__name__)

BACK_OFF = 60.0
"""Maximum seconds between two attempts to open a lost source. If a source has worked for more than BACK_OFF seconds,
its earlier failures no longer count."""
GONE = select.POLLHUP | select.POLLNVAL
"""Events of a dead descriptor. POLLERR is not one of them: it may also mean an overflow."""


class Source(Protocol):
    """Reports changes of one kind on the host.

    If `open`, `polled` or `needs_pass` raises any exception, even one from a library, the source is lost: it is closed,
    and opened again later. An exception from `close` is logged.
    """

    name: str

    def open(self) -> None:
        """Begin to watch. Raises OSError."""
        ...

    def close(self) -> None:
        """Release everything that `open` has acquired, even if `open` failed."""
        ...

    def polled(self) -> Mapping[int, int]:
        """Return the events to wait for with poll(2), by file descriptor."""
        ...

    def needs_pass(self) -> bool:
        """Consume pending events without blocking, and return whether a pass is needed. Raises OSError."""
        ...


class Interrupt(Protocol):
    """The part of agent.host.daemon.loop.Signals that a wait needs."""

    @property
    def pending(self) -> bool: ...

    def fileno(self) -> int: ...

    def drain(self) -> None: ...


class Settling(Struct, frozen=True):
    """How long after events a pass begins, in seconds.

    One second of events causes at most three passes if the events come without a pause, otherwise at most four.
    """

    quiet: float = 0.002
    """Time without a further event before a pass begins, because related events come together. The time is short, so as
    not to delay a new GPU. It is long enough for nvidia-modprobe, which sets the mode of a node within microseconds of
    making the node."""
    longest: float = 0.5
    """The longest time from the first event to its pass, however many events follow."""
    spacing: float = 0.5
    """The minimum mean time between the starts of passes that events cause. After a silence, a second pass may directly
    follow the first one: a change of the host often comes in two steps, such as a device and then its mode."""


class Tally(Struct):
    """The counts of one source, for metrics."""

    name: str
    watching: bool = False
    wakeups: int = 0
    """Number of passes that the source caused."""
    losses: int = 0
    """How often the source broke, or could not be opened at the start."""


class _Tracked(Struct):
    """A source with its state. Times are by time.monotonic()."""

    source: Source
    tally: Tally
    failures: int = 0
    """Losses and failed attempts to open the source, in a row."""
    opened: float = 0.0
    """When the source was opened."""
    retry: float = 0.0
    """When a lost source is opened again."""


class Wakeups:
    """All sources. A lost source is opened again; that causes a pass, because the source may have missed events."""

    def __init__(self, sources: Iterable[Source] = (), settling: Settling | None = None) -> None:
        self.settling = settling or Settling()
        self._tracked = [_Tracked(source, Tally(source.name)) for source in sources]
        self._spaced = -math.inf
        """When the next pass could begin at the earliest, by time.monotonic(), if passes for events always began at
        least `spacing` apart. In fact, the next pass may begin up to one `spacing` earlier than that."""
        self.first = -math.inf
        """When the first event of the last wait was noticed, by time.monotonic(). An event during a pass is noticed at
        the end of the pass."""

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """The tally of each source."""
        return tuple(tracked.tally for tracked in self._tracked)

    def watches(self, name: str) -> bool:
        """Return whether the source of this name exists and works."""
        return any(tracked.tally.watching for tracked in self._tracked if tracked.source.name == name)

    def open(self) -> None:
        """Open all sources. Call this before the first pass: otherwise, events before the first wait are missed."""
        for tracked in self._tracked:
            self._open(tracked)

    def wait(self, seconds: float, interrupt: Interrupt) -> str:
        """Wait for events. Return the name of the first source that needs a pass; empty on timeout or a signal."""
        deadline = time.monotonic() + seconds
        # Begin with the sources that had events during the last pass. `due` is a dict and not a set, because a dict
        # keeps the order in which the sources were noticed.
        due = dict.fromkeys(self._due(self._tracked))
        self.first = last = time.monotonic()
        while not interrupt.pending:
            now = time.monotonic()
            until = self._pass_time(self.first, last) if due else deadline
            if now >= until:
                break
            new = self._due(self._ready(until - now, interrupt))
            if new:
                last = time.monotonic()
                self.first = self.first if due else last
                due |= dict.fromkeys(new)
        if not due or interrupt.pending:
            return ""
        self._spaced = max(time.monotonic(), self._spaced) + self.settling.spacing
        for tracked in self._tracked:
            tracked.tally.wakeups += tracked.source.name in due
        return next(iter(due))

    def _pass_time(self, first: float, last: float) -> float:
        settling = self.settling
        return max(min(last + settling.quiet, first + settling.longest), self._spaced - settling.spacing)

    def _ready(self, seconds: float, interrupt: Interrupt) -> list[_Tracked]:
        """Wait for events, at most `seconds`. Return the sources that have events, and all lost sources."""
        owners: dict[int, _Tracked] = {}
        poll = select.poll()
        poll.register(interrupt.fileno(), select.POLLIN)
        closed = [tracked for tracked in self._tracked if not tracked.tally.watching]
        for tracked in (tracked for tracked in self._tracked if tracked.tally.watching):
            with self._watched(tracked):
                for descriptor, events in tracked.source.polled().items():
                    poll.register(descriptor, events)
                    owners[descriptor] = tracked
            if not tracked.tally.watching:
                closed.append(tracked)
        seconds = min([seconds, *(tracked.retry - time.monotonic() for tracked in closed)])
        polled = poll.poll(max(0, math.ceil(seconds * 1000)))
        for descriptor, events in polled:
            if descriptor == interrupt.fileno():
                interrupt.drain()
            elif events & GONE and owners[descriptor].tally.watching:
                self._lose(owners[descriptor], "its file descriptor was closed or hung up")
        ready = {id(owners[each]): owners[each] for each, _ in polled if each in owners}
        return [*ready.values(), *(tracked for tracked in closed if id(tracked) not in ready)]

    def _due(self, sources: Iterable[_Tracked]) -> list[str]:
        """Return the names of sources that need a pass: they had an event, or may have missed one while they were lost.

        Open lost sources again whose time for the next attempt has come.
        """
        due = []
        for tracked in sources:
            needs_pass = False
            if tracked.tally.watching:
                with self._watched(tracked):
                    needs_pass = tracked.source.needs_pass()
            elif time.monotonic() >= tracked.retry:
                needs_pass = self._open(tracked)
            if needs_pass:
                due.append(tracked.source.name)
        return due

    def _open(self, tracked: _Tracked) -> bool:
        with self._watched(tracked):
            tracked.source.open()
            if tracked.failures:
                log.info("event source %s works again", tracked.source.name)
            tracked.tally.watching, tracked.opened = True, time.monotonic()
        return tracked.tally.watching

    @contextlib.contextmanager
    def _watched(self, tracked: _Tracked) -> Iterator[None]:
        """Lose the source after any error of the block, even one from a library: the others go on."""
        try:
            yield
        except Exception as error:
            self._lose(tracked, in_words(error))

    def _lose(self, tracked: _Tracked, why: str) -> None:
        """Close a source, and set when to open it again: first at once, then after ever longer times.

        A loss is logged and counted once, even if attempts to open the source again fail.
        """
        now, tally = time.monotonic(), tracked.tally
        if tally.watching and now - tracked.opened > BACK_OFF:
            tracked.failures = 0
        if tally.watching or not tracked.failures:
            tally.losses += 1
            log.error(
                "event source %s lost, timed passes replace it until it works again: %s", tally.name, one_line(why)
            )
        tracked.failures += 1
        # Limit the exponent too: after a day of failures, the power would be too large for a float.
        doubled = min(tracked.failures - 2, 10)
        tracked.retry = now + (min(BACK_OFF, 2.0**doubled) if tracked.failures > 1 else 0.0)
        tally.watching = False
        try:
            tracked.source.close()
        except Exception as error:
            log.error("event source %s was not closed properly: %s", tally.name, in_words(error))


NODES = inotify.CREATE | inotify.DELETE | inotify.MOVED_FROM | inotify.MOVED_TO | inotify.ATTRIB
"""Events of device nodes. CLOSE_WRITE is not one of them, because any program that closes a GPU's node causes it."""
FILES = NODES | inotify.CLOSE_WRITE
"""Events of regular files."""
DIRECTORY = inotify.ONLYDIR | inotify.MOVE_SELF
"""Flags for the directory itself. MOVE_SELF is needed, because a move of the directory causes no event without this
flag. The directory's removal always causes an event (IN_IGNORED)."""
ANY = ""
"""Stands for any name: the directory itself appeared, changed or disappeared, or events were lost."""
MOUNTS = "/proc/self/mountinfo"
"""poll(2) reports POLLERR and POLLPRI for this file after mounts in this mount namespace have changed (proc(5))."""


class Directories:
    """An event source: names in directories, which may appear and disappear.

    pyroute2's Inotify is not used, because it has no non-blocking read, treats a failed inotify_add_watch(2) as a
    success, and exits when events overflow.
    """

    def __init__(
        self,
        name: str,
        system: System,
        where: Callable[[], Iterable[str]],
        matters: Callable[[str, str], bool],
        events: int = NODES,
        mounts: bool = False,
    ) -> None:
        """Set what is watched: the directories that `where` returns.

        `matters` decides whether a change needs a pass. It gets a directory, and the changed name in it or ANY. With
        `mounts`, changes of mounts are noticed too, because file systems may be mounted over the directories.
        """
        self.name = name
        self._system, self._where, self._matters = system, where, matters
        self._events, self._with_mounts = events, mounts
        self._inotify: inotify.Inotify | None = None
        self._mounts: int | None = None
        self._watched: dict[str, int] = {}
        """Watch descriptors by path. If two paths lead to the same directory, they have the same descriptor. Its events
        are then attributed to one of the two paths."""

    def open(self) -> None:
        self._inotify = inotify.Inotify()
        if self._with_mounts:
            self._mounts = opening.stream(MOUNTS)
        self._watch(self._inotify)

    def close(self) -> None:
        self._watched = {}
        if self._inotify is not None:
            # The descriptor may be bad (EBADF): that can be the reason for closing it.
            with contextlib.suppress(OSError):
                self._inotify.close()
        if self._mounts is not None:
            with contextlib.suppress(OSError):
                os.close(self._mounts)
        self._inotify = self._mounts = None

    def polled(self) -> Mapping[int, int]:
        polled = {} if self._inotify is None else {self._inotify.fileno(): select.POLLIN}
        return polled if self._mounts is None else polled | {self._mounts: select.POLLPRI}

    def needs_pass(self) -> bool:
        if self._inotify is None:
            return False
        paths = {watch: path for path, watch in self._watched.items()}
        # A set, because thousands of events for one name need only one check.
        touched: set[tuple[str, str]] = set()
        for event in self._inotify.read():
            if event.mask & inotify.Q_OVERFLOW:
                touched |= {(path, ANY) for path in self._watched}
            elif path := paths.get(event.watch):
                touched.add((path, event.name))
                if event.mask & inotify.IGNORED:
                    self._watched.pop(path, None)
        touched |= {(path, ANY) for path in self._watch(self._inotify)}
        # A list, not a generator: `matters` may keep state, so it must be called for each name.
        return any([self._matters(path, name) for path, name in sorted(touched)])

    def _watch(self, instance: inotify.Inotify) -> list[str]:
        """Watch the directories that exist now. Return those that are new, were replaced, or no longer exist."""
        wanted, changed = tuple(self._where()), []
        for path in wanted:
            try:
                # If the inode is watched already, the kernel returns the existing watch descriptor.
                watch = instance.add(self._system.full_path(path), self._events | DIRECTORY)
            except (FileNotFoundError, NotADirectoryError):
                if self._forget(instance, path):
                    changed.append(path)
                continue
            if self._watched.get(path) != watch:
                self._forget(instance, path)
                self._watched[path] = watch
                changed.append(path)
        for path in self._watched.keys() - set(wanted):
            self._forget(instance, path)
        return changed

    def _forget(self, instance: inotify.Inotify, path: str) -> bool:
        watch = self._watched.pop(path, None)
        if watch is None:
            return False
        # This fails with EINVAL if the directory was removed, because the kernel has then removed the watch too.
        with contextlib.suppress(OSError):
            instance.remove(watch)
        return True


BATCH = 1000
"""How many events one call of `needs_pass` parses at most."""


class Udev:
    """An event source: udevd's events, after it has run the device's rules, which may make nodes."""

    name = "udev"

    def __init__(self, system: System, modules: tuple[str, ...], monitor: Callable[[], Monitor] = udev_monitor) -> None:
        """Set what is watched. `modules` has patterns (fnmatch) of the kernel modules that matter."""
        self._system, self._modules, self._make = system, modules, monitor
        self._monitor: Monitor | None = None

    def open(self) -> None:
        if not self._system.exists(CONTROL):
            raise FileNotFoundError(errno.ENOENT, "udevd is not running: its socket is missing", CONTROL)
        self._monitor = self._make()

    def close(self) -> None:
        self._monitor = None

    def polled(self) -> Mapping[int, int]:
        return {} if self._monitor is None else {self._monitor.fileno(): select.POLLIN}

    def needs_pass(self) -> bool:
        """Do as every Source. An overflow is an error: the source is then opened again, which needs a pass."""
        monitor = self._monitor
        for _ in range(BATCH):
            device = monitor.poll(0) if monitor else None
            if device is None:
                return False
            if matters(device, self._modules):
                # The pass will observe everything. A new monitor has none of the events that still wait, so nothing
                # needs to parse them.
                self.open()
                return True
        # None of these BATCH events matters. If there are more, the monitor stays readable, and the next call comes at
        # once.
        return False


def matters(event: Event, modules: tuple[str, ...]) -> bool:
    """Return whether the event can change what a pass observes."""
    if event.subsystem == "drm" and event.action == "change":
        # HOTPLUG=1: a display was plugged in or out (drivers/gpu/drm/drm_sysfs.c), which does not affect the nodes.
        return event.properties.get("HOTPLUG") != "1"
    if event.subsystem == "drivers":
        # libudev uses this subsystem for the drivers of all buses; only those of PCI matter.
        return event.device_path.startswith("/bus/pci/drivers/")
    if event.subsystem == "module":
        # Only the vendors' modules matter: the start of a Kubernetes node loads dozens of others.
        return any(fnmatchcase(event.device_path.removeprefix("/module/"), pattern) for pattern in modules)
    return True


DEV = "/dev"
REPORTS = "reports"
HEARTBEAT = 90.0
"""If no report came for this many seconds, the next report needs a pass, even if its content is unchanged. A report is
due every 60 s."""
MANY, PERIOD = 40, 60.0
"""One machine's reports may cause at most MANY passes in PERIOD seconds. Further reports wait for the timer's pass.
MANY is enough for sixteen GPUs that come one after another, even if each causes two passes."""


def host_sources(
    system: System, vendors: tuple[HostVendor, ...], driver: Callable[[], DriverSettings]
) -> tuple[Source, ...]:
    """Return all event sources except the kernel log. `driver` returns the current settings of the driver."""
    return (
        Udev(system, tuple(pattern for vendor in vendors for pattern in vendor.module_names)),
        device_nodes(system, vendors),
        driver_libraries(system, vendors, driver),
        machined(system),
        commands(system),
        Directories(
            REPORTS, system, lambda: report_directories(system), NewReports(system).matters, FILES, mounts=True
        ),
    )


def device_nodes(system: System, vendors: tuple[HostVendor, ...]) -> Directories:
    """Return a source that watches vendors' device nodes, and the directories of their daemons' sockets.

    The source is needed because udev has no events for nodes without a sysfs device.
    """
    is_node = _any_of(pattern for vendor in vendors for pattern in vendor.node_names)
    directories = tuple(dict.fromkeys(each for vendor in vendors for each in vendor.node_directories))

    def matters(directory: str, name: str) -> bool:
        # Directories below /dev hold nodes, so every name matters. All others hold daemons' sockets; clients may write
        # there, so only the existence of these directories matters.
        return is_node(directory, name) if directory == DEV else name == ANY or directory.startswith(f"{DEV}/")

    return Directories("device-nodes", system, lambda: (DEV, *directories), matters)


def driver_libraries(
    system: System, vendors: tuple[HostVendor, ...], driver: Callable[[], DriverSettings]
) -> Directories:
    """Return a source that watches loader caches and libraries.

    A directory that is made later is watched from the next pass on.
    """
    matters = _any_of(pattern for vendor in vendors for pattern in vendor.library_names)

    def where() -> tuple[str, ...]:
        return tuple(dict.fromkeys(each for vendor in vendors for each in vendor.library_directories(driver())))

    return Directories("loader-cache", system, where, matters, FILES)


def machined(system: System) -> Directories:
    """Return a source that watches systemd-machined's record of machines, which shows when a machine stops."""
    # Ignore the link `unit:...` that each machine has too, and temporary files, which begin with a dot.
    return Directories(
        "machined", system, lambda: (MACHINED_STATE,), lambda _, name: not name.startswith(("unit:", "."))
    )


def commands(system: System) -> Directories:
    """Return a source that watches for WAKE, which `gpus forget` writes to make the service start a pass."""
    return Directories("commands", system, lambda: (RUNTIME,), _any_of([os.path.basename(WAKE)]), FILES)


def _any_of(patterns: Iterable[str]) -> Callable[[str, str], bool]:
    """Return a function for Directories: a name matters if it fits one of the patterns, and ANY does too."""
    wanted = tuple(patterns)
    return lambda _, name: name == ANY or any(fnmatchcase(name, pattern) for pattern in wanted)


def report_directories(system: System) -> list[str]:
    """Return the report directories of all machines, configured or not."""
    try:
        return [report_directory(name) for name in system.entries(MACHINES_RUNTIME)]
    except FileNotFoundError:
        return []


class NewReports:
    """Decides which reports need a pass, and limits how many passes a machine can cause by writing reports."""

    def __init__(self, system: System, clock: Callable[[], float] = time.monotonic) -> None:
        self._system, self._clock = system, clock
        self._last: dict[str, tuple[str, float]] = {}
        """Digest and time of the last report, by directory."""
        self._passes: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MANY))
        """When reports last caused passes, at most MANY times, by directory."""

    def matters(self, directory: str, name: str) -> bool:
        """Return whether the report in this directory has changed, or is the first one after HEARTBEAT seconds.

        If the machine's reports have caused too many passes lately, return False in any case.
        """
        if name not in (REPORT_NAME, ANY):
            return False
        now, digest = self._clock(), self._digest(directory)
        # A new machine has no report yet, which does not count as a change. No pass is needed for the new machine:
        # unbounded-agent-prepare@ makes a pass at each start of a machine.
        last_digest, last_time = self._last.get(directory, ("", now))
        self._last[directory] = digest, now
        if digest == last_digest and now - last_time < HEARTBEAT:
            return False
        passes = self._passes[directory]
        if len(passes) == MANY and now - passes[0] < PERIOD:
            return False
        passes.append(now)
        return True

    def _digest(self, directory: str) -> str:
        try:
            content = self._system.read_untrusted(f"{directory}/{REPORT_NAME}", SIZE_LIMIT)[0]
        except FileNotFoundError:
            return ""
        except OSError as error:
            # Use the error instead of the content: a report that becomes unreadable needs a pass, which says why.
            return str(error.errno)
        return sha256(content)
