"""The sources of a real host. What is watched of a vendor's nodes, the vendor says."""

import hashlib
import time
from collections import defaultdict, deque
from collections.abc import Callable
from fnmatch import fnmatchcase

from agent.config import DriverSettings
from agent.handoff import SIZE_LIMIT
from agent.paths import MACHINED_STATE, MACHINES_RUNTIME, REPORT_NAME, report_directory
from agent.system.files import System
from agent.vendors.protocols import HostVendor
from agent.wakeups import Source
from agent.wakeups.directories import ANY, FILES, Directories
from agent.wakeups.udev import Udev

DEV = "/dev"
REPORTS = "reports"
HEARTBEAT = 90.0
"""Seconds: a report comes each 60 s. The first one after a longer silence is news, whatever it says."""
MANY, PERIOD = 10, 60.0
"""Passes that the reports of one machine may cause within so many seconds; beyond, the timer has to do."""

NONE = b""
"""Instead of a report's digest."""


def host_sources(
    system: System, vendors: tuple[HostVendor, ...], driver: Callable[[], DriverSettings]
) -> tuple[Source, ...]:
    """Everything that tells of a change. `driver`: the present configuration."""
    return (
        Udev(system, tuple(pattern for vendor in vendors for pattern in vendor.module_names)),
        device_nodes(system, vendors),
        driver_libraries(system, vendors, driver),
        machined(system),
        Directories(
            REPORTS, system, lambda: report_directories(system), NewReports(system).matters, FILES, mounts=True
        ),
    )


def device_nodes(system: System, vendors: tuple[HostVendor, ...]) -> Directories:
    """Nodes that vendors name. Drivers that make nodes without a sysfs device cause no event of udev's."""
    patterns = tuple(pattern for vendor in vendors for pattern in vendor.node_names)
    directories = tuple(dict.fromkeys(each for vendor in vendors for each in vendor.node_directories))

    def matters(directory: str, name: str) -> bool:
        if directory == DEV:
            return name == ANY or any(fnmatchcase(name, pattern) for pattern in patterns)
        # In a directory of a daemon's sockets clients may write: only that it comes and goes is of interest.
        return name == ANY or directory.startswith(f"{DEV}/")

    return Directories("device-nodes", system, lambda: (DEV, *directories), matters)


def driver_libraries(
    system: System, vendors: tuple[HostVendor, ...], driver: Callable[[], DriverSettings]
) -> Directories:
    """Loaders' caches and the libraries themselves. A directory that is made anew is watched from the next pass on."""
    patterns = tuple(pattern for vendor in vendors for pattern in vendor.library_names)

    def where() -> tuple[str, ...]:
        return tuple(dict.fromkeys(each for vendor in vendors for each in vendor.library_directories(driver())))

    def matters(_: str, name: str) -> bool:
        return name == ANY or any(fnmatchcase(name, pattern) for pattern in patterns)

    return Directories("loader-cache", system, where, matters, FILES)


def machined(system: System) -> Directories:
    """What systemd-machined keeps of each machine that runs: a machine that ends cannot report it."""

    def matters(_: str, name: str) -> bool:
        # Links `unit:...` come with each machine, and files with a dot in front become one.
        return name == ANY or not name.startswith(("unit:", "."))

    return Directories("machined", system, lambda: (MACHINED_STATE,), matters)


def report_directories(system: System) -> list[str]:
    """Those of all machines, configured or not, as prepare@ made them."""
    try:
        return [report_directory(name) for name in system.entries(MACHINES_RUNTIME)]
    except FileNotFoundError:
        return []


class NewReports:
    """Tells news from heartbeats, and bounds what a machine can make its host do by writing reports."""

    def __init__(self, system: System, clock: Callable[[], float] = time.monotonic) -> None:
        self._system, self._clock = system, clock
        self._known: dict[str, tuple[bytes, float]] = {}
        """The last report's digest, and when it came."""
        self._passes: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MANY))

    def matters(self, directory: str, name: str) -> bool:
        """Whether that machine's report is another one, or the first one for long."""
        if name not in (REPORT_NAME, ANY):
            return False
        now, digest = self._clock(), self._digest(directory)
        # A machine that starts for the first time has none, which is no news while prepare@ makes its pass.
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
            # Something else than a report: the pass says what.
            return str(error.errno).encode()
        return hashlib.sha256(content).digest()
