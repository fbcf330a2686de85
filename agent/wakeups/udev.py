"""Devices and drivers that come and go, as udevd tells of them when it is done with their nodes."""

import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Protocol

from agent.system.files import System

SUBSYSTEMS = ("pci", "drivers", "module", "drm")
CONTROL = "/run/udev/control"
"""udevd's socket. Without it libudev makes a monitor that never gets anything, and says nothing of it."""
BUFFER = 16 << 20
"""Bytes. libudev's own size is less than what thousands of events need while a pass goes on."""
BATCH = 1000
"""Events looked at in one go."""


class Event(Protocol):
    """The part of pyudev.Device that is used here; pyudev has no type annotations."""

    subsystem: str
    action: str
    device_path: str
    properties: Mapping[str, str]


class Monitor(Protocol):
    """The part of pyudev.Monitor that is used here."""

    def fileno(self) -> int: ...

    def poll(self, timeout: float) -> Event | None: ...


def udev_monitor() -> Monitor:
    """Of SUBSYSTEMS, receiving. Raises OSError."""
    # libudev is loaded by ctypes, here rather than at import: a host without it has a source less, no traceback.
    import pyudev

    monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="udev")
    for subsystem in SUBSYSTEMS:
        monitor.filter_by(subsystem)
    # EPERM without CAP_NET_ADMIN above net.core.rmem_max: it overflows sooner then, and the pass lists all again.
    with contextlib.suppress(OSError):
        monitor.set_receive_buffer_size(BUFFER)
    monitor.start()
    found: Monitor = monitor
    return found


class Udev:
    """A Source, by libudev's monitor."""

    name = "udev"

    def __init__(self, system: System, modules: tuple[str, ...], monitor: Callable[[], Monitor] = udev_monitor) -> None:
        """`modules`: patterns of the kernel modules that matter."""
        self._system, self._modules, self._make = system, modules, monitor
        self._monitor: Monitor | None = None
        self._socket: socket.socket | None = None
        """The monitor's, for what pyudev has no words for: an overflow, and leaving a rest unread."""

    def open(self) -> None:
        if not self._system.exists(CONTROL):
            raise FileNotFoundError(errno.ENOENT, "udevd does not run, there is no", CONTROL)
        monitor = self._make()
        self._monitor, self._socket = monitor, socket.socket(fileno=os.dup(monitor.fileno()))

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._monitor = self._socket = None

    def polled(self) -> Mapping[int, int]:
        return {} if self._monitor is None else {self._monitor.fileno(): select.POLLIN}

    def asks(self) -> bool:
        if self._monitor is None or self._socket is None:
            return False
        for _ in range(BATCH):
            try:
                device = self._monitor.poll(0)
            except OSError as error:
                # pyudev's error for POLLERR has no number, the socket has.
                if errno.ENOBUFS not in (error.errno, self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    raise
                break
            if device is None:
                return False
            if matters(device, self._modules):
                break
        else:
            return False
        self._drain(self._socket)
        return True

    def _drain(self, receiving: socket.socket) -> None:
        """Leave the rest unread, as the pass looks at everything: under a storm parsing is what costs."""
        for _ in range(100 * BATCH):
            try:
                receiving.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise


def matters(event: Event, modules: tuple[str, ...]) -> bool:
    """Whether it can change what a pass sees."""
    if event.subsystem == "drm" and event.action == "change":
        # A monitor was plugged in (drivers/gpu/drm/drm_sysfs.c); the nodes stay what they are.
        return event.properties.get("HOTPLUG") != "1"
    if event.subsystem == "drivers":
        # libudev shows drivers of all buses under this one name.
        return event.device_path.startswith("/bus/pci/drivers/")
    if event.subsystem == "module":
        # A node that starts loads dozens of others.
        return any(fnmatchcase(event.device_path.removeprefix("/module/"), pattern) for pattern in modules)
    return True
