"""Receives udevd's events. The only module that imports pyudev."""

import contextlib
from collections.abc import Mapping
from typing import Protocol

CONTROL = "/run/udev/control"
"""udevd's socket. If it is missing, libudev silently makes a monitor that never gets an event."""
DATABASE = "/run/udev/data"
"""What udevd knows of each device that it has processed: the file of a character device is `cMAJOR:MINOR`."""
SUBSYSTEMS = ("pci", "drivers", "module", "drm")
"""Subsystems whose events a monitor receives."""
BUFFER = 16 << 20
"""Bytes for events that have not been read yet: thousands may come during a pass. libudev's default is too small."""


class Event(Protocol):
    """What a monitor received: the part of pyudev.Device that is used for events."""

    subsystem: str
    action: str
    device_path: str
    properties: Mapping[str, str]


class Monitor(Protocol):
    """The part of pyudev.Monitor that is used here."""

    def fileno(self) -> int: ...

    def poll(self, timeout: float) -> Event | None: ...


def udev_monitor() -> Monitor:
    """Return a started monitor of SUBSYSTEMS. Raises OSError, or ImportError without libudev."""
    # Imported here, because this loads libudev: a host without libudev loses only one source of events.
    import pyudev

    monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="udev")
    for subsystem in SUBSYSTEMS:
        monitor.filter_by(subsystem)
    # Without CAP_NET_ADMIN, the kernel refuses more than net.core.rmem_max (EPERM). The buffer then overflows sooner,
    # which does no harm: a pass lists all devices.
    with contextlib.suppress(OSError):
        monitor.set_receive_buffer_size(BUFFER)
    monitor.start()
    found: Monitor = monitor
    return found
