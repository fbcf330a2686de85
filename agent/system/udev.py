"""Lists PCI and DRM devices and receives udevd's events. The only module that imports pyudev.

Listing devices needs no running udevd: libudev reads sysfs.
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from agent.model.facts import DrmDevice, PciDevice, Seen, Unseen
from agent.model.pci_address import PCI_ADDRESS

D = TypeVar("D")

PCI_CLASSES = ("0x03*", "0x0680*", "0x12*")
"""Patterns (fnmatch) of the `class` of the PCI devices that are listed: display controllers, other bridges (NVSwitch)
and processing accelerators. A large host has hundreds of other devices."""
DRM_MINOR = re.compile(r"card[0-9]+|renderD[0-9]+")
"""Names of DRM nodes. Connectors, such as card0-DP-1, are devices of the same subsystem."""
DRI = "/dev/dri"
"""The directory of all nodes of DRM minors (drm_devnode of drivers/gpu/drm/drm_sysfs.c)."""
SUBSYSTEMS = ("pci", "drivers", "module", "drm")
"""Subsystems whose events a monitor receives."""
BUFFER = 16 << 20
"""Bytes for events that have not been read yet: thousands may come during a pass. libudev's default is too small."""


class DeviceSource(Protocol):
    """Lists devices of the kernel in sorted order; Unseen if that fails. Of PCI devices, only those of PCI_CLASSES."""

    def pci_devices(self) -> Seen[tuple[PciDevice, ...]]: ...

    def drm_devices(self) -> Seen[tuple[DrmDevice, ...]]: ...


class Udev:
    """The DeviceSource of a real host."""

    def __init__(self) -> None:
        # Contexts are kept, because each new one runs `ldconfig -p` to find libudev (ctypes.util). There is one for
        # each subsystem, because two threads list the two subsystems at once, and a context is for one thread only.
        self._contexts: dict[str, Any] = {}

    def pci_devices(self) -> Seen[tuple[PciDevice, ...]]:
        return self._listed("pci", _pci_device, PCI_CLASSES)

    def drm_devices(self) -> Seen[tuple[DrmDevice, ...]]:
        return self._listed("drm", _drm_device)

    def _listed(
        self, subsystem: str, convert: "Callable[[_Device], D | None]", classes: tuple[str, ...] = ()
    ) -> Seen[tuple[D, ...]]:
        try:
            # Imported here, because this loads libudev: a host without it gets a fact, not a traceback.
            import pyudev

            if subsystem not in self._contexts:
                self._contexts[subsystem] = pyudev.Context()
            listed = self._contexts[subsystem].list_devices(subsystem=subsystem)
            for each in classes:
                # In libudev 252, the oldest that is supported, a device must match one of several values.
                listed.match_attribute("class", each)
            found = [convert(device) for device in listed]
        except Exception as error:  # pyudev raises whatever errno libudev left, ImportError and its own types.
            return Unseen(f"udev: cannot list {subsystem} devices: {type(error).__name__}: {error}")
        return tuple(sorted(each for each in found if each is not None))  # type: ignore[type-var]


class _Device(Protocol):
    """The part of pyudev.Device that is used here; pyudev has no type annotations."""

    sys_name: str
    device_path: str
    driver: str | None
    attributes: Mapping[str, bytes]


def _pci_device(device: _Device) -> PciDevice | None:
    """Return the device, or None if it was removed while its attributes were read."""
    vendor, product, kind = (device.attributes.get(name) for name in ("vendor", "device", "class"))
    if vendor is None or product is None or kind is None:
        return None
    return PciDevice(device.sys_name, int(vendor, 16), int(product, 16), int(kind, 16), device.driver or "")


def _drm_device(device: _Device) -> DrmDevice | None:
    if not DRM_MINOR.fullmatch(device.sys_name):
        return None
    # From the device's path in sysfs: pyudev would make an object of libudev for each device above it, which took most
    # of the time of a pass on a host with many GPUs.
    above = [part for part in device.device_path.split("/") if PCI_ADDRESS.fullmatch(part)]
    return DrmDevice(f"{DRI}/{device.sys_name}", above[-1] if above else "")


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
    # Imported here, because this loads libudev: a host without it loses one source of events.
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
