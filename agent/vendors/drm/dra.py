"""Reads from sysfs the facts that agent.dra publishes about GPUs that need only device nodes."""

import contextlib
from collections.abc import Mapping, Sequence

from agent.model.allocatable import AllocatableDevice
from agent.model.digits import whole_number
from agent.model.paths import PCI_DEVICES
from agent.system.deadlines import read_device_text
from agent.system.files import System
from agent.vendors.dra_vendor import Attribute, DeviceFacts, DraVendor, semantic_version


class DrmDra(DraVendor):
    """The base class of vendors whose GPUs need only device nodes. Files are in the GPU's directory in PCI_DEVICES."""

    product_file = ""
    """The file with the product's name; empty if the driver has none."""
    unique_id_file = ""
    """The file with the GPU's permanent id; empty if the driver has none."""
    memory_files: tuple[str, ...] = ()
    """Files that may have the size of the GPU's own memory in bytes. The first number other than 0 is used."""

    def read_facts(
        self, system: System, devices: Sequence[AllocatableDevice], driver_version: str
    ) -> Mapping[AllocatableDevice, DeviceFacts]:
        return {each: self._facts(system, each, driver_version) for each in devices}

    def _facts(self, system: System, device: AllocatableDevice, driver_version: str) -> DeviceFacts:
        directory = f"{PCI_DEVICES}/{device.pci_address}"
        attributes: dict[str, Attribute] = {}
        if version := semantic_version(driver_version):
            attributes["driverVersion"] = version
        for name, file in (("productName", self.product_file), ("uuid", self.unique_id_file), ("pciDevice", "device")):
            if file and (text := _text(system, f"{directory}/{file}")):
                attributes[name] = text
        sizes = (whole_number(_text(system, f"{directory}/{file}")) for file in self.memory_files)
        memory = next((size for size in sizes if size), 0)
        return DeviceFacts(attributes, {"memory": memory} if memory else {})


def _text(system: System, path: str) -> str:
    """Return a file's text without the newline; empty if it cannot be read in time or is not printable."""
    with contextlib.suppress(OSError):
        text = read_device_text(system, path).strip()
        return text if text.isprintable() else ""
    return ""
