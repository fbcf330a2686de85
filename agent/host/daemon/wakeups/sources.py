"""The event sources of a real host. Vendors name what to watch for them."""

import hashlib
import time
from collections import defaultdict, deque
from collections.abc import Callable
from fnmatch import fnmatchcase

from agent.config.settings import DriverSettings
from agent.host.daemon.wakeups.inotify import ANY, FILES, Directories
from agent.host.daemon.wakeups.poller import Source
from agent.host.daemon.wakeups.udev import Udev
from agent.model.handoff import SIZE_LIMIT
from agent.model.paths import MACHINED_STATE, MACHINES_RUNTIME, REPORT_NAME, RUNTIME, WAKE, report_directory
from agent.system.files import System
from agent.vendors.host_vendor import HostVendor

DEV = "/dev"
REPORTS = "reports"
HEARTBEAT = 90.0
"""Seconds: a report comes every 60 s. The first one after a longer silence is news, whatever it says."""
MANY, PERIOD = 10, 60.0
"""Number of passes that the reports of one machine may cause within so many seconds; further ones await the timer."""

NONE = b""
"""Digest of a missing report."""


def host_sources(
    system: System, vendors: tuple[HostVendor, ...], driver: Callable[[], DriverSettings]
) -> tuple[Source, ...]:
    """Return all sources of events. `driver` returns the current configuration."""
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
    """Watch nodes that vendors name: udev has no event for drivers that make nodes without a sysfs device."""
    patterns = tuple(pattern for vendor in vendors for pattern in vendor.node_names)
    directories = tuple(dict.fromkeys(each for vendor in vendors for each in vendor.node_directories))

    def matters(directory: str, name: str) -> bool:
        if directory == DEV:
            return name == ANY or any(fnmatchcase(name, pattern) for pattern in patterns)
        # Clients may write in a directory of a daemon's sockets: only whether the directory exists matters.
        return name == ANY or directory.startswith(f"{DEV}/")

    return Directories("device-nodes", system, lambda: (DEV, *directories), matters)


def driver_libraries(
    system: System, vendors: tuple[HostVendor, ...], driver: Callable[[], DriverSettings]
) -> Directories:
    """Watch loader caches and the libraries themselves. A recreated directory is watched from the next pass on."""
    patterns = tuple(pattern for vendor in vendors for pattern in vendor.library_names)

    def where() -> tuple[str, ...]:
        return tuple(dict.fromkeys(each for vendor in vendors for each in vendor.library_directories(driver())))

    def matters(_: str, name: str) -> bool:
        return name == ANY or any(fnmatchcase(name, pattern) for pattern in patterns)

    return Directories("loader-cache", system, where, matters, FILES)


def machined(system: System) -> Directories:
    """Watch systemd-machined's record of running machines: a machine that ends cannot report it."""

    def matters(_: str, name: str) -> bool:
        # Each machine has a link `unit:...` too, and temporary files begin with a dot.
        return name == ANY or not name.startswith(("unit:", "."))

    return Directories("machined", system, lambda: (MACHINED_STATE,), matters)


def commands(system: System) -> Directories:
    """Watch for the agent's commands that change what the service reports; ignore the service's own files."""

    def matters(_: str, name: str) -> bool:
        return f"{RUNTIME}/{name}" == WAKE

    return Directories("commands", system, lambda: (RUNTIME,), matters, FILES)


def report_directories(system: System) -> list[str]:
    """Return the directories that prepare@ made, of all machines, configured or not."""
    try:
        return [report_directory(name) for name in system.entries(MACHINES_RUNTIME)]
    except FileNotFoundError:
        return []


class NewReports:
    """Tells news from heartbeats, and limits how many passes a machine can cause by writing reports."""

    def __init__(self, system: System, clock: Callable[[], float] = time.monotonic) -> None:
        self._system, self._clock = system, clock
        self._known: dict[str, tuple[bytes, float]] = {}
        """Digest and time of the last report, by directory."""
        self._passes: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MANY))

    def matters(self, directory: str, name: str) -> bool:
        """Return whether that machine's report has changed, or is the first after a long silence."""
        if name not in (REPORT_NAME, ANY):
            return False
        now, digest = self._clock(), self._digest(directory)
        # A machine that starts for the first time has no report. That is no news: prepare@ makes a pass then.
        known, came = self._known.get(directory, (NONE, now))
        self._known[directory] = digest, now
        if digest == known and now - came < HEARTBEAT:
            return False
        passes = self._passes[directory]
        if len(passes) == MANY and now - passes[0] < PERIOD:
            return False
        passes.append(now)
        return True

    def _digest(self, directory: str) -> bytes:
        try:
            content = self._system.read_untrusted(f"{directory}/{REPORT_NAME}", SIZE_LIMIT)[0]
        except FileNotFoundError:
            return NONE
        except OSError as error:
            # Not a report: the pass reports what it is.
            return str(error.errno).encode()
        return hashlib.sha256(content).digest()
