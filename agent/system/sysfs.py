"""Lists PCI and DRM devices from sysfs (sysfs(5), Documentation/ABI/testing/sysfs-bus-pci in the kernel).

libudev could list them too. But it opens every directory above each device, which took a third of the time until a
plugged GPU opens; it shows no DRM node that udevd has not seen; and it reads `uevent` files, which may wait for a
driver. No file that is read here does.
"""

import os
import re
from typing import Protocol

from agent.model.facts import DrmDevice, PciDevice, Seen, Unseen
from agent.model.pci_address import PCI_ADDRESS
from agent.system.errnos import NOT_FOUND
from agent.system.files import System

PCI = "/sys/bus/pci/devices"
DRM = "/sys/class/drm"
DRI = "/dev/dri"
"""The directory of all nodes of DRM minors (drm_devnode of drivers/gpu/drm/drm_sysfs.c)."""
DISPLAY, BRIDGE_OTHER, ACCELERATOR = 0x03, 0x0680, 0x12
"""Classes of PCI devices: all display controllers, other bridges such as NVSwitch, all processing accelerators."""
DRM_MINOR = re.compile(r"card[0-9]+|renderD[0-9]+")
"""Names of DRM nodes. Connectors, such as card0-DP-1, are devices of the same class."""


class DeviceSource(Protocol):
    """Lists devices of the kernel in sorted order; Unseen if that fails. Of PCI devices, only those of `listed`."""

    def pci_devices(self) -> Seen[tuple[PciDevice, ...]]: ...

    def drm_devices(self) -> Seen[tuple[DrmDevice, ...]]: ...


def listed(class_id: int) -> bool:
    """Return whether PCI devices of a class (24 bits) are listed. A large host has hundreds of others."""
    return class_id >> 16 in (DISPLAY, ACCELERATOR) or class_id >> 8 == BRIDGE_OTHER


class Sysfs:
    """The DeviceSource of a real host."""

    def __init__(self, system: System) -> None:
        self._system = system

    def pci_devices(self) -> Seen[tuple[PciDevice, ...]]:
        try:
            found = [self._pci_device(name) for name in self._names(PCI)]
        except OSError as error:
            return Unseen(f"{error.filename or PCI}: {error.strerror or error}")
        return tuple(sorted(each for each in found if each))

    def drm_devices(self) -> Seen[tuple[DrmDevice, ...]]:
        try:
            found = [self._drm_device(name) for name in self._names(DRM) if DRM_MINOR.fullmatch(name)]
        except OSError as error:
            return Unseen(f"{error.filename or DRM}: {error.strerror or error}")
        return tuple(sorted(each for each in found if each))

    def _names(self, directory: str) -> tuple[str, ...]:
        try:
            return self._system.entries(directory)
        except FileNotFoundError:
            # The kernel has no PCI bus, or no DRM driver is loaded.
            return ()

    def _pci_device(self, address: str) -> PciDevice | None:
        """Return the device; None if it is not listed, or was removed meanwhile."""
        place = f"{PCI}/{address}"
        try:
            kind = self._number(f"{place}/class")
            if not listed(kind):
                return None
            vendor, product = self._number(f"{place}/vendor"), self._number(f"{place}/device")
            driver = os.path.basename(self._system.read_link(f"{place}/driver") or "")
        except OSError as error:
            if error.errno in NOT_FOUND:
                return None
            raise
        return PciDevice(address, vendor, product, kind, driver)

    def _drm_device(self, name: str) -> DrmDevice | None:
        """Return the node with the PCI device that is nearest above it in sysfs; None if it was removed meanwhile."""
        target = self._system.read_link(f"{DRM}/{name}")
        if target is None:
            return None
        above = [part for part in target.split("/") if PCI_ADDRESS.fullmatch(part)]
        return DrmDevice(f"{DRI}/{name}", above[-1] if above else "")

    def _number(self, path: str) -> int:
        """Return the number in a file. Raises OSError."""
        text = self._system.attribute(path).strip()
        try:
            return int(text, 16)
        except ValueError:
            raise OSError(None, f"{text[:80]!r} is no hexadecimal number", path) from None
