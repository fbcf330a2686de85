"""PCI and DRM devices by pyudev; the only importer of it. Needs no running udevd: libudev reads sysfs."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from agent.facts import DrmDevice, PciDevice, Seen, Unseen

D = TypeVar("D")

DRM_MINOR = re.compile(r"card[0-9]+|renderD[0-9]+")
"""Minors only: connectors are devices of the same subsystem, such as card0-DP-1."""


class DeviceSource(Protocol):
    """Where the kernel's devices are listed; sorted, each once."""

    def pci_devices(self) -> Seen[tuple[PciDevice, ...]]: ...

    def drm_devices(self) -> Seen[tuple[DrmDevice, ...]]: ...


class Udev:
    """The DeviceSource of a real host."""

    def __init__(self) -> None:
        # A new one runs `ldconfig -p` each time, to find libudev (ctypes.util). One for each list: they are made by two
        # threads at once, and libudev's contexts are for one thread each.
        self._contexts: dict[str, Any] = {}

    def pci_devices(self) -> Seen[tuple[PciDevice, ...]]:
        return self._listed("pci", _pci_device)

    def drm_devices(self) -> Seen[tuple[DrmDevice, ...]]:
        return self._listed("drm", _drm_device)

    def _listed(self, subsystem: str, convert: "Callable[[_Device], D | None]") -> Seen[tuple[D, ...]]:
        try:
            # libudev is loaded by ctypes, here rather than at import: a host without it gets a fact, not a traceback.
            import pyudev

            if subsystem not in self._contexts:
                self._contexts[subsystem] = pyudev.Context()
            found = [convert(device) for device in self._contexts[subsystem].list_devices(subsystem=subsystem)]
        except Exception as error:  # pyudev raises whatever errno libudev left, ImportError and its own types.
            return Unseen(f"udev: {subsystem} devices cannot be listed: {type(error).__name__}: {error}")
        return tuple(sorted(each for each in found if each is not None))  # type: ignore[type-var]


class _Device(Protocol):
    """The part of pyudev.Device that is used here; pyudev has no type annotations."""

    sys_name: str
    device_node: str | None
    driver: str | None
    parent: "_Device | None"
    attributes: Mapping[str, bytes]

    def find_parent(self, subsystem: str) -> "_Device | None": ...


def _pci_device(device: _Device) -> PciDevice | None:
    """None for a device that went while it was looked at: its attributes are gone then."""
    vendor, product, kind = (device.attributes.get(name) for name in ("vendor", "device", "class"))
    if vendor is None or product is None or kind is None:
        return None
    return PciDevice(device.sys_name, int(vendor, 16), int(product, 16), int(kind, 16), device.driver or "")


def _drm_device(device: _Device) -> DrmDevice | None:
    if device.device_node is None or not DRM_MINOR.fullmatch(device.sys_name):
        return None
    pci = device.find_parent("pci")
    parent = device.parent
    # Not by their truth: a device is a mapping, of which pyudev would read every property.
    driver = parent.driver if parent is not None else None
    return DrmDevice(device.device_node, pci.sys_name if pci is not None else "", driver or "")
