"""Waits for events that require a pass before the loop's timer expires. Everything runs in the loop's thread.

The loop also works without any event source.
"""

import contextlib
import errno
import logging
import math
import os
import re
import select
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Protocol

from msgspec import Struct

from agent.config.settings import DriverSettings
from agent.model.device import PCI_ADDRESS
from agent.model.goal import in_words
from agent.model.handoff import SIZE_LIMIT
from agent.model.paths import MACHINED_STATE, MACHINES_RUNTIME, REPORT_NAME, RUNTIME, WAKE, report_directory
from agent.model.text import one_line, sha256
from agent.system import inotify, opening
from agent.system.devices import CONTROL, Event, Monitor, udev_monitor
from agent.system.files import System
from agent.vendors.host_vendor import GpuError, HostVendor, wedged

log = logging.getLogger(__name__)

BACK_OFF = 60.0
"""Maximum seconds between two attempts to open a lost source. If a source has worked for more than BACK_OFF seconds,
its earlier failures no longer count."""
GONE = select.POLLHUP | select.POLLNVAL
"""Events of a dead descriptor. POLLERR is not one of them: it may also mean an overflow."""


class Source(Protocol):
    """Reports changes of one kind. If a method but `close` raises anything, the source is closed and opened again."""

    name: str

    def open(self) -> None: ...

    def close(self) -> None:
        """Release everything that `open` has acquired, even if `open` failed."""

    def polled(self) -> Mapping[int, int]:
        """Return the events to wait for with poll(2), by file descriptor."""

    def needs_pass(self) -> bool:
        """Consume pending events without blocking, and return whether a pass is needed."""


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
    """The state and the counts of one source. Times are by time.monotonic()."""

    name: str
    watching: bool = False
    wakeups: int = 0
    """Number of passes that the source caused."""
    losses: int = 0
    """How often the source broke, or could not be opened at the start."""
    failures: int = 0
    """Losses and failed attempts to open the source, in a row."""
    opened: float = 0.0
    retry: float = 0.0
    """When a lost source is opened again."""


class Wakeups:
    """All sources. A lost source is opened again; that causes a pass, because the source may have missed events."""

    def __init__(self, sources: Iterable[Source] = (), settling: Settling | None = None) -> None:
        self.settling = settling or Settling()
        self._sources = {source.name: source for source in sources}
        self.tallies = {name: Tally(name) for name in self._sources}
        self._spaced = -math.inf
        """When the next pass could begin at the earliest, by time.monotonic(), if passes for events always began at
        least `spacing` apart. In fact, the next pass may begin up to one `spacing` earlier than that."""
        self.first = -math.inf
        """When the first event of the last wait was noticed, by time.monotonic(). An event during a pass is noticed at
        the end of the pass."""

    def open(self) -> None:
        """Open all sources. Call this before the first pass: otherwise, events before the first wait are missed."""
        for name in self._sources:
            self._open(name)

    def wait(self, seconds: float, interrupt: int) -> str:
        """Wait for events. Return the name of the first source that needs a pass.

        The name is empty on timeout, or if the descriptor `interrupt` is readable.
        """
        deadline, settling = time.monotonic() + seconds, self.settling
        # Begin with the sources that had events during the last pass. `due` is a dict and not a set, because a dict
        # keeps the order in which the sources were noticed.
        due = dict.fromkeys(self._due(self._sources))
        self.first = last = time.monotonic()
        while True:
            now, until = time.monotonic(), deadline
            if due:
                until = min(last + settling.quiet, self.first + settling.longest)
                until = max(until, self._spaced - settling.spacing)
            if now >= until:
                break
            ready = self._ready(until - now, interrupt)
            if ready is None:
                return ""
            if new := self._due(ready):
                last = time.monotonic()
                self.first = self.first if due else last
                due |= dict.fromkeys(new)
        if due:
            self._spaced = max(time.monotonic(), self._spaced) + settling.spacing
        for name in due:
            self.tallies[name].wakeups += 1
        return next(iter(due), "")

    def _ready(self, seconds: float, interrupt: int) -> list[str] | None:
        """Wait at most `seconds`. Return the sources that have events, and all lost ones; None after an interrupt."""
        owners, poll = dict[int, str](), select.poll()
        poll.register(interrupt, select.POLLIN)
        for name, tally in self.tallies.items():
            if tally.watching:
                with self._watched(name):
                    for descriptor, events in self._sources[name].polled().items():
                        poll.register(descriptor, events)
                        owners[descriptor] = name
        lost = [tally for tally in self.tallies.values() if not tally.watching]
        seconds = min([seconds, *(tally.retry - time.monotonic() for tally in lost)])
        ready = dict[str, None]()
        for descriptor, events in poll.poll(max(0, math.ceil(seconds * 1000))):
            if descriptor == interrupt:
                return None
            ready[owners[descriptor]] = None
            if events & GONE and self.tallies[owners[descriptor]].watching:
                self._lose(owners[descriptor], "its file descriptor was closed or hung up")
        return list(ready | dict.fromkeys(tally.name for tally in lost))

    def _due(self, names: Iterable[str]) -> list[str]:
        """Return those sources that need a pass: they had an event, or may have missed one while they were lost.

        Open lost sources again whose time for the next attempt has come.
        """
        due = []
        for name in names:
            needs_pass = False
            if self.tallies[name].watching:
                with self._watched(name):
                    needs_pass = self._sources[name].needs_pass()
            elif time.monotonic() >= self.tallies[name].retry:
                needs_pass = self._open(name)
            due += [name] if needs_pass else []
        return due

    def _open(self, name: str) -> bool:
        tally = self.tallies[name]
        with self._watched(name):
            self._sources[name].open()
            if tally.failures:
                log.info("event source %s works again", name)
            tally.watching, tally.opened = True, time.monotonic()
        return tally.watching

    @contextlib.contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Lose the source after any error of the block, even one from a library: the others go on."""
        try:
            yield
        except Exception as error:
            self._lose(name, in_words(error))

    def _lose(self, name: str, why: str) -> None:
        """Close a source, and set when to open it again: first at once, then after ever longer times.

        A loss is logged and counted once, even if attempts to open the source again fail.
        """
        now, tally = time.monotonic(), self.tallies[name]
        if tally.watching and now - tally.opened > BACK_OFF:
            tally.failures = 0
        if tally.watching or not tally.failures:
            tally.losses += 1
            log.error("event source %s lost, timed passes replace it until it works again: %s", name, one_line(why))
        tally.failures += 1
        # Limit the exponent too: after a day of failures, the power would be too large for a float.
        doubled = min(tally.failures - 2, 10)
        tally.retry = now + (min(BACK_OFF, 2.0**doubled) if tally.failures > 1 else 0.0)
        tally.watching = False
        with contextlib.suppress(OSError):
            self._sources[name].close()


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
    """An event source: names in directories, which may appear and disappear."""

    def __init__(
        self,
        name: str,
        system: System,
        where: Callable[[], Iterable[str]],
        matters: Callable[[str, str], bool],
        events: int = NODES,
        mounts: bool = False,
    ) -> None:
        """Watch the directories that `where` returns. With `mounts`, changes of what is mounted over them count too.

        `matters` decides whether a change needs a pass. It gets a directory, and the changed name in it or ANY.
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
        # A descriptor may be bad (EBADF): that can be the reason for closing it.
        if self._inotify is not None:
            with contextlib.suppress(OSError):
                self._inotify.close()
        if self._mounts is not None:
            with contextlib.suppress(OSError):
                os.close(self._mounts)
        self._inotify, self._mounts, self._watched = None, None, {}

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
        wanted, changed = dict.fromkeys(self._where()), []
        for path in wanted | self._watched:
            before, watch = self._watched.get(path), None
            if path in wanted:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    # If the inode is watched already, the kernel returns the existing watch descriptor.
                    watch = instance.add(self._system.full_path(path), self._events | DIRECTORY)
            if watch == before:
                continue
            if before is not None:
                del self._watched[path]
                # This fails with EINVAL if the directory was removed, as the kernel has then removed the watch too.
                with contextlib.suppress(OSError):
                    instance.remove(before)
            if watch is not None:
                self._watched[path] = watch
            changed += [path] if path in wanted else []
        return changed


BATCH = 1000
"""How many events one call of `needs_pass` parses at most."""
CARD = re.compile(rf".*/({PCI_ADDRESS.pattern})/drm/card[0-9]+")
"""The path of a GPU's DRM node, for which the kernel sends the events of a wedged GPU (drm_dev_wedged_event)."""


class Udev:
    """An event source: udevd's events, after it has run the device's rules, which may make nodes."""

    name = "udev"

    def __init__(
        self,
        system: System,
        modules: tuple[str, ...],
        failed: Callable[[GpuError], bool],
        monitor: Callable[[], Monitor] = udev_monitor,
    ) -> None:
        """`modules` has patterns (fnmatch) of the kernel modules that matter. `failed` gets errors of GPUs, and returns
        whether they need a pass."""
        self._system, self._modules, self._failed, self._make = system, modules, failed, monitor
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
        monitor, needed = self._monitor, False
        for _ in range(BATCH):
            event = monitor.poll(0) if monitor else None
            if event is None:
                break
            # Read on after an event that needs a pass: the next one may be that of a wedged GPU, which is not repeated.
            needed = matters(event, self._modules) or needed
            card = CARD.fullmatch(event.device_path)
            if card and (methods := event.properties.get("WEDGED")):
                needed = self._failed(wedged(card[1], methods)) or needed
        # If there are more than BATCH events, the monitor stays readable, and the next call comes at once.
        return needed


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
        return _fits(event.device_path.removeprefix("/module/"), modules)
    return True


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


DEV = "/dev"
REPORTS = "reports"
HEARTBEAT = 90.0
"""If no report came for this many seconds, the next report needs a pass, even if its content is unchanged. A report is
due every 60 s."""
MANY, PERIOD = 40, 60.0
"""One machine's reports may cause at most MANY passes in PERIOD seconds. Further reports wait for the timer's pass.
MANY is enough for sixteen GPUs that come one after another, even if each causes two passes."""


def host_sources(
    system: System,
    vendors: tuple[HostVendor, ...],
    driver: Callable[[], DriverSettings],
    failed: Callable[[GpuError], bool],
) -> tuple[Source, ...]:
    """Return all event sources except the kernel log.

    `driver` returns the current settings of the driver. `failed` gets the errors of GPUs that udevd reports,
    and returns whether they need a pass.
    """
    modules = tuple(pattern for vendor in vendors for pattern in vendor.module_names)
    nodes = [pattern for vendor in vendors for pattern in vendor.node_names]
    libraries = [pattern for vendor in vendors for pattern in vendor.library_names]
    directories = [each for vendor in vendors for each in vendor.node_directories]

    def node_matters(directory: str, name: str) -> bool:
        # Directories below /dev hold nodes, so every name matters. All others hold daemons' sockets; clients may write
        # there, so only the existence of these directories matters.
        return name == ANY or (_fits(name, nodes) if directory == DEV else directory.startswith(f"{DEV}/"))

    def reports() -> Iterable[str]:
        # The report directories of all machines, configured or not.
        with contextlib.suppress(FileNotFoundError):
            return map(report_directory, system.entries(MACHINES_RUNTIME))
        return ()

    return (
        Udev(system, modules, failed),
        # Vendors' device nodes, and the directories of their daemons' sockets: udev has no events for nodes without a
        # sysfs device.
        Directories("device-nodes", system, lambda: (DEV, *directories), node_matters),
        # Loader caches and libraries. A directory that is made later is watched from the next pass on.
        Directories(
            "loader-cache",
            system,
            lambda: (each for vendor in vendors for each in vendor.library_directories(driver())),
            lambda _, name: name == ANY or _fits(name, libraries),
            FILES,
        ),
        # systemd-machined's record of machines, which shows when a machine stops. Ignore the link `unit:...` that each
        # machine has too, and temporary files, which begin with a dot.
        Directories("machined", system, lambda: (MACHINED_STATE,), lambda _, name: not name.startswith(("unit:", "."))),
        # The file that `gpus forget` writes to make the service start a pass.
        Directories(
            "commands", system, lambda: (RUNTIME,), lambda _, name: name in (ANY, os.path.basename(WAKE)), FILES
        ),
        Directories(REPORTS, system, reports, NewReports(system).matters, FILES, mounts=True),
    )


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
        try:
            digest = sha256(self._system.read_untrusted(f"{directory}/{REPORT_NAME}", SIZE_LIMIT)[0])
        except FileNotFoundError:
            digest = ""
        except OSError as error:
            # Use the error instead of the content: a report that becomes unreadable needs a pass, which says why.
            digest = str(error.errno)
        now, passes = self._clock(), self._passes[directory]
        # A new machine has no report yet, which does not count as a change. No pass is needed for the new machine:
        # unbounded-agent-prepare@ makes a pass at each start of a machine.
        last_digest, last_time = self._last.get(directory, ("", now))
        self._last[directory] = digest, now
        if digest == last_digest and now - last_time < HEARTBEAT:
            return False
        if len(passes) == MANY and now - passes[0] < PERIOD:
            return False
        passes.append(now)
        return True
