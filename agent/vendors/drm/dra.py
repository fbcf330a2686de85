"""What sysfs knows of GPUs that need only their DRM nodes, for their offer by Dynamic Resource Allocation."""

import contextlib
from collections.abc import Mapping, Sequence

from agent.model.allocatable import AllocatableDevice
from agent.model.digits import whole_number
from agent.system.deadlines import read_device_text
from agent.system.files import System
from agent.vendors.dra_vendor import Attribute, DeviceFacts, DraVendor, semantic_version

PCI_DEVICES = "/sys/bus/pci/devices"


class DrmDra(DraVendor):
    """The base class of these vendors."""

    product = ""
    """The file, next to the device's others, with the product's name; empty if the driver has none."""
    unique_id = ""
    """The file with an id that the GPU never changes; empty if the driver has none."""
    memory: tuple[str, ...] = ()
    """Files that may have the bytes of the GPU's own memory."""

    def read_facts(
        self, system: System, devices: Sequence[AllocatableDevice], driver_version: str
    ) -> Mapping[AllocatableDevice, DeviceFacts]:
        return {each: self._facts(system, each, driver_version) for each in devices}

    def _facts(self, system: System, device: AllocatableDevice, driver_version: str) -> DeviceFacts:
        place = f"{PCI_DEVICES}/{device.pci_address}"
        attributes: dict[str, Attribute] = {}
        if version := semantic_version(driver_version):
            attributes["driverVersion"] = version
        for name, file in (("productName", self.product), ("uuid", self.unique_id), ("pciDevice", "device")):
            if text := _text(system, f"{place}/{file}") if file else "":
                attributes[name] = text
        found = (whole_number(_text(system, f"{place}/{file}")) for file in self.memory)
        memory = next((number for number in found if number), 0)
        return DeviceFacts(attributes, {"memory": memory} if memory else {})


def _text(system: System, path: str) -> str:
    """Return a file's text without the newline; empty if there is no such file, or the driver does not answer."""
    with contextlib.suppress(OSError):
        text = read_device_text(system, path).strip()
        return text if text.isprintable() else ""
    return ""
