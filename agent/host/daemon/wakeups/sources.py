"""Makes the event sources of a real host. Each vendor names what to watch for it."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from fnmatch import fnmatchcase

from agent.config.settings import DriverSettings
from agent.host.daemon.wakeups.inotify import ANY, FILES, Directories
from agent.host.daemon.wakeups.poller import Source
from agent.host.daemon.wakeups.udev import Udev
from agent.model.digest import sha256
from agent.model.handoff import SIZE_LIMIT
from agent.model.paths import MACHINED_STATE, MACHINES_RUNTIME, REPORT_NAME, RUNTIME, WAKE, report_directory
from agent.system.files import System
from agent.vendors.host_vendor import HostVendor

DEV = "/dev"
REPORTS = "reports"
HEARTBEAT = 90.0
"""If no report came for this many seconds, the next report needs a pass, even if its content is unchanged. A report is
due every 60 s."""
MANY, PERIOD = 40, 60.0
"""One machine's reports may cause at most MANY passes in PERIOD seconds. Further reports wait for the timer's pass.
MANY is enough for sixteen GPUs that come one after another, even if each causes two passes."""

NONE = ""
"""Stands for the digest of a missing report."""


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
    patterns = tuple(pattern for vendor in vendors for pattern in vendor.node_names)
    directories = tuple(dict.fromkeys(each for vendor in vendors for each in vendor.node_directories))

    def matters(directory: str, name: str) -> bool:
        if directory == DEV:
            return name == ANY or any(fnmatchcase(name, pattern) for pattern in patterns)
        # Directories below /dev hold nodes, so every name matters. All others hold daemons' sockets; clients may write
        # there, so only the existence of these directories matters.
        return name == ANY or directory.startswith(f"{DEV}/")

    return Directories("device-nodes", system, lambda: (DEV, *directories), matters)


def driver_libraries(
    system: System, vendors: tuple[HostVendor, ...], driver: Callable[[], DriverSettings]
) -> Directories:
    """Return a source that watches loader caches and libraries.

    A directory that is made later is watched from the next pass on.
    """
    patterns = tuple(pattern for vendor in vendors for pattern in vendor.library_names)

    def where() -> tuple[str, ...]:
        return tuple(dict.fromkeys(each for vendor in vendors for each in vendor.library_directories(driver())))

    def matters(_: str, name: str) -> bool:
        return name == ANY or any(fnmatchcase(name, pattern) for pattern in patterns)

    return Directories("loader-cache", system, where, matters, FILES)


def machined(system: System) -> Directories:
    """Return a source that watches systemd-machined's record of machines, which shows when a machine stops."""

    def matters(_: str, name: str) -> bool:
        # Ignore the link `unit:...` that each machine has too, and temporary files, which begin with a dot.
        return name == ANY or not name.startswith(("unit:", "."))

    return Directories("machined", system, lambda: (MACHINED_STATE,), matters)


def commands(system: System) -> Directories:
    """Return a source that watches for WAKE, which `gpus forget` writes to make the service start a pass."""

    def matters(_: str, name: str) -> bool:
        return name == ANY or f"{RUNTIME}/{name}" == WAKE

    return Directories("commands", system, lambda: (RUNTIME,), matters, FILES)


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
        last_digest, last_time = self._last.get(directory, (NONE, now))
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
            return NONE
        except OSError as error:
            # Use the error instead of the content: a report that becomes unreadable needs a pass, which says why.
            return str(error.errno)
        return sha256(content)
