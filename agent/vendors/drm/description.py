"""Describes how a vendor's GPUs are recognised on the host. Pure."""

from msgspec import Struct

from agent.model.device import DeviceKind
from agent.model.facts import PciDevice
from agent.model.pci_classes import DISPLAY


class SharedNode(Struct, frozen=True):
    """A node that all GPUs of the vendor share."""

    path: str
    kind: DeviceKind
    registered: str
    """The name of the node's driver in /proc/devices."""
    use: str
    """What does not work without the node, in words."""


class Description(Struct, frozen=True):
    """One vendor."""

    name: str
    title: str
    """The vendor's name for people."""
    vendor_id: int
    drivers: tuple[str, ...]
    """Names of the kernel drivers on the PCI bus, which are also the names of their modules."""
    firmware: str
    """Distributions' packages with the GPUs' firmware, in words."""
    further_classes: tuple[int, ...] = ()
    """PCI classes (base class and subclass) of GPUs that are not display controllers."""
    shared: tuple[SharedNode, ...] = ()
    partition_mode: str = ""
    """The attribute in sysfs that says in which mode a GPU is divided; empty if the vendor's GPUs have none."""
    whole: str = ""
    """The value of the attribute `partition_mode` for a GPU that is not divided."""

    def is_gpu(self, device: PciDevice) -> bool:
        """Return whether the device is a GPU of this vendor, with or without a driver."""
        if device.vendor_id != self.vendor_id:
            return False
        return device.class_id >> 16 == DISPLAY or device.class_id >> 8 in self.further_classes
