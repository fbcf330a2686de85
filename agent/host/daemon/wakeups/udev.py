"""Watches devices and drivers. udevd sends an event after it has run the device's rules, which may make nodes."""

import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from agent.system.files import System
from agent.system.udev import CONTROL, Event, Monitor, udev_monitor

BATCH = 1000
"""How many events one call of `needs_pass` parses at most."""


class Udev:
    """An event source: libudev's monitor."""

    name = "udev"

    def __init__(self, system: System, modules: tuple[str, ...], monitor: Callable[[], Monitor] = udev_monitor) -> None:
        """Set what is watched. `modules` has patterns (fnmatch) of the kernel modules that matter."""
        self._system, self._modules, self._make = system, modules, monitor
        self._monitor: Monitor | None = None
        self._socket: socket.socket | None = None
        """The monitor's socket, for what pyudev cannot do: detect an overflow, and discard events unparsed."""

    def open(self) -> None:
        if not self._system.exists(CONTROL):
            raise FileNotFoundError(errno.ENOENT, "udevd is not running: its socket is missing", CONTROL)
        monitor = self._make()
        self._monitor, self._socket = monitor, socket.socket(fileno=os.dup(monitor.fileno()))

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._monitor = self._socket = None

    def polled(self) -> Mapping[int, int]:
        return {} if self._monitor is None else {self._monitor.fileno(): select.POLLIN}

    def needs_pass(self) -> bool:
        if self._monitor is None or self._socket is None:
            return False
        for _ in range(BATCH):
            try:
                device = self._monitor.poll(0)
            except OSError as error:
                # ENOBUFS: events were lost, so a pass is needed. pyudev's error for POLLERR has no errno, but the
                # socket has one.
                if errno.ENOBUFS not in (error.errno, self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    raise
                break
            if device is None:
                return False
            if matters(device, self._modules):
                break
        else:
            # None of these BATCH events matters. If there are more events, the socket stays readable, so the next call
            # comes at once.
            return False
        self._drain(self._socket)
        return True

    def _drain(self, receiving: socket.socket) -> None:
        """Discard further events without the cost of parsing them: the pass will observe everything."""
        for _ in range(100 * BATCH):
            try:
                receiving.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise


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
