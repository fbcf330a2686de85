"""Lists PCI and DRM devices from sysfs (sysfs(5), Documentation/ABI/testing/sysfs-bus-pci in the kernel).

libudev could list them too. But it opens every directory above each device, which took more than half of a pass
on an emulated host. It shows no DRM node if udevd has never run. And it reads `uevent` files, which may wait for a
driver; none of the files read here can block.
"""

import contextlib
import errno
import os
import re
from typing import Protocol

from agent.model.facts import DrmDevice, PciDevice, Seen, Unseen
from agent.model.paths import PCI_DEVICES
from agent.model.pci_address import PCI_ADDRESS
from agent.model.pci_classes import ACCELERATOR, BRIDGE_OTHER, DISPLAY, ENCRYPTION
from agent.system.errnos import NOT_FOUND
from agent.system.files import System
from agent.system.udev import CONTROL, DATABASE

CLASSES = "/sys/class"
"""A directory that every kernel has in sysfs."""
DRM = "/sys/class/drm"
DRI = "/dev/dri"
"""The directory of all nodes of DRM minors (drm_devnode of drivers/gpu/drm/drm_sysfs.c)."""
DRM_MINOR = re.compile(r"card[0-9]+|renderD[0-9]+")
"""Names of DRM nodes. Connectors, such as card0-DP-1, are devices of the same class."""


class DeviceSource(Protocol):
    """Lists devices of the kernel in sorted order; Unseen if that fails.

    Includes only the PCI devices that `listed` accepts.
    """

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
            names = self._names(PCI_DEVICES)
            found = [self._pci_device(name, names) for name in names]
        except OSError as error:
            return Unseen(f"{error.filename or PCI_DEVICES}: {error.strerror or error}")
        return tuple(sorted(each for each in found if each))

    def drm_devices(self) -> Seen[tuple[DrmDevice, ...]]:
        try:
            udevd_runs = self._system.exists(CONTROL)
            names = [name for name in self._names(DRM) if DRM_MINOR.fullmatch(name)]
            found = [self._drm_device(name) for name in names if not udevd_runs or self._is_processed(name)]
        except OSError as error:
            return Unseen(f"{error.filename or DRM}: {error.strerror or error}")
        return tuple(sorted(each for each in found if each))

    def _names(self, directory: str) -> tuple[str, ...]:
        try:
            return self._system.entries(directory)
        except FileNotFoundError:
            if not self._system.exists(CLASSES):
                # An empty list would withdraw every GPU.
                raise OSError(errno.ENOENT, "sysfs is not mounted", CLASSES) from None
            # The kernel has no PCI bus, or no DRM driver is loaded.
            return ()

    def _pci_device(self, address: str, names: tuple[str, ...]) -> PciDevice | None:
        """Return the device; None if its class is not `listed`, or the device was removed meanwhile."""
        place = f"{PCI_DEVICES}/{address}"
        try:
            kind = self._number(f"{place}/class")
            if not listed(kind):
                return None
            # The vendor is read last. If the device is removed meanwhile, the missing vendor shows that. A missing
            # driver would not show it, because a device may have no driver.
            driver = os.path.basename(self._system.read_link(f"{place}/driver") or "")
            override = "" if driver else self._override(place)
            virtual = self._system.exists(f"{place}/physfn")
            integrated = self._is_integrated(address, names)
            vendor = self._number(f"{place}/vendor")
        except OSError as error:
            if error.errno in NOT_FOUND:
                return None
            raise
        return PciDevice(address, vendor, kind, driver, override, virtual, integrated)

    def _is_integrated(self, address: str, names: tuple[str, ...]) -> bool:
        """Return PciDevice.integrated. `names` are the addresses of all PCI devices."""
        slot = address.rpartition(".")[0]
        return any(
            self._is_security_processor(each) for each in names if each.startswith(f"{slot}.") and each != address
        )

    def _is_security_processor(self, address: str) -> bool:
        # An error, as of a function that was removed meanwhile, says nothing about the GPU in its slot.
        with contextlib.suppress(OSError):
            return self._number(f"{PCI_DEVICES}/{address}/class") >> 8 == ENCRYPTION
        return False

    def _override(self, place: str) -> str:
        """Return the device's driver_override; empty if it has none (driver_override_show in the kernel)."""
        try:
            text = self._system.attribute(f"{place}/driver_override").strip()
        except FileNotFoundError:
            return ""
        return "" if text == "(null)" else text

    def _is_processed(self, name: str) -> bool:
        """Return whether udevd has set mode and owner of a DRM node.

        As soon as udevd has set them, it sends an event, which causes a pass.
        """
        try:
            number = self._system.attribute(f"{DRM}/{name}/dev").strip()
        except OSError as error:
            if error.errno in NOT_FOUND:
                return False
            raise
        return self._system.exists(f"{DATABASE}/c{number}")

    def _drm_device(self, name: str) -> DrmDevice | None:
        """Return the node with its PCI device; None if the node was removed meanwhile.

        Drivers of GPUs register their nodes with the PCI device itself. A node of any other device is returned without
        a PCI address. An example is the node of the firmware's framebuffer: the kernel places the framebuffer below the
        GPU that the firmware uses.
        """
        target = self._system.read_link(f"{DRM}/{name}")
        if target is None:
            return None
        device = os.path.basename(target.removesuffix(f"/drm/{name}"))
        return DrmDevice(f"{DRI}/{name}", device if PCI_ADDRESS.fullmatch(device) else "")

    def _number(self, path: str) -> int:
        """Return the hexadecimal number in a file. Raises OSError."""
        text = self._system.attribute(path).strip()
        try:
            return int(text, 16)
        except ValueError:
            raise OSError(errno.EINVAL, f"{text[:80]!r} is not a hexadecimal number", path) from None
