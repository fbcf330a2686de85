"""What identifies a vendor's GPUs on the host. Pure."""

from dataclasses import dataclass

from agent.model.device import DeviceKind
from agent.model.facts import PciDevice

DISPLAY = 0x03
"""Base class of display controllers of any subclass: processors' GPUs are VGA controllers, those of data centres
3D or other display controllers. Base class, subclass and programming interface have eight bits each (pci_ids.h)."""


@dataclass(frozen=True, slots=True)
class SharedNode:
    """A node that all GPUs of the vendor share."""

    path: str
    kind: DeviceKind
    registered: str
    """Its driver's name in /proc/devices."""
    use: str
    """What is impossible without it, in words."""


@dataclass(frozen=True, slots=True)
class Description:
    """One vendor."""

    name: str
    title: str
    """As the vendor writes it."""
    vendor_id: int
    drivers: tuple[str, ...]
    """Names on the PCI bus, which are also the modules' names."""
    firmware: str
    """Packages with the firmware that the drivers load into the GPU, in words."""
    further_classes: tuple[int, ...] = ()
    """Base class and subclass of GPUs that are not display controllers."""
    shared: tuple[SharedNode, ...] = ()

    def is_gpu(self, device: PciDevice) -> bool:
        """Return whether it is a GPU, of any driver. A board management controller's display is another vendor's."""
        if device.vendor_id != self.vendor_id:
            return False
        return device.class_id >> 16 == DISPLAY or device.class_id >> 8 in self.further_classes
