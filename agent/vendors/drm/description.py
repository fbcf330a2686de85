"""By what the GPUs of a vendor are known on the host. Pure."""

from dataclasses import dataclass

from agent.facts import PciDevice
from agent.identity import DeviceKind

DISPLAY = 0x03
"""Base class of display controllers, by whichever subclass: processors' GPUs are VGA controllers, those of data centres
3D or other display controllers. Base class, subclass and programming interface have eight bits each (pci_ids.h)."""


@dataclass(frozen=True, slots=True)
class SharedNode:
    """A node that all GPUs of the vendor share."""

    path: str
    kind: DeviceKind
    registered: str
    """Its driver's name in /proc/devices."""
    use: str
    """What cannot be done without it, in words."""


@dataclass(frozen=True, slots=True)
class Description:
    """One vendor."""

    name: str
    title: str
    """As it writes itself."""
    vendor_id: int
    drivers: tuple[str, ...]
    """Names on the PCI bus, which are those of the modules too."""
    firmware: str
    """Packages that have what the drivers load into the GPU, in words."""
    further_classes: tuple[int, ...] = ()
    """Base class and subclass of GPUs beside display controllers."""
    shared: tuple[SharedNode, ...] = ()

    def is_gpu(self, device: PciDevice) -> bool:
        """Whichever driver it has. The display of a board's management controller is another vendor's."""
        if device.vendor_id != self.vendor_id:
            return False
        return device.class_id >> 16 == DISPLAY or device.class_id >> 8 in self.further_classes
