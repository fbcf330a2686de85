"""Reads from sysfs the facts that agent.dra publishes about GPUs that need only device nodes."""

from collections.abc import Mapping, Sequence

from agent.model.contract import AllocatableDevice
from agent.model.paths import PCI_DEVICES
from agent.model.text import whole_number
from agent.system.deadlines import read_device_texts
from agent.system.files import System
from agent.vendors.dra_vendor import FACTS_LIMIT, Attribute, DeviceFacts, DraVendor, semantic_version
from agent.vendors.drm.machine import HARMLESS_RESOURCES, RESOURCE_PREFIX


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
        files = [each for each in (self.product_file, self.unique_id_file, "device", *self.memory_files) if each]
        paths = [f"{PCI_DEVICES}/{device.pci_address}/{each}" for each in files]
        # Each file that hangs halves the time for the next one. So even if all files hang, this takes little more than
        # FACTS_LIMIT.
        texts = dict(zip(files, read_device_texts(system, paths, FACTS_LIMIT / 2), strict=True))
        attributes: dict[str, Attribute] = {}
        if version := semantic_version(driver_version):
            attributes["driverVersion"] = version
        for name, file in (("productName", self.product_file), ("uuid", self.unique_id_file), ("pciDevice", "device")):
            if text := _printable(texts.get(file, "")):
                attributes[name] = text
        memory = next((size for each in self.memory_files if (size := whole_number(_printable(texts[each])))), 0)
        # A file that does not exist will not appear later, so the facts are complete without it. But a driver that did
        # not answer may answer later.
        complete = all(isinstance(each, str | FileNotFoundError) for each in texts.values())
        return DeviceFacts(attributes, {"memory": memory} if memory else {}, complete)


def _printable(text: str | OSError) -> str:
    """Return a file's text without the newline; empty if the file could not be read or the text is not printable."""
    stripped = text.strip() if isinstance(text, str) else ""
    return stripped if stripped.isprintable() else ""


# The attributes of AMD's GPUs for Dynamic Resource Allocation.


class AmdDra(DrmDra):
    """AMD's GPUs. The files are amdgpu's (amdgpu_device.c, amdgpu_vram_mgr.c, amdgpu_pm.c in the kernel)."""

    name = "amd"
    resource_prefix = "amd.com/"
    product_file = "product_name"
    unique_id_file = "unique_id"
    memory_files = ("mem_info_vram_total",)


# The attributes of Intel's GPUs for Dynamic Resource Allocation.


class IntelDra(DrmDra):
    """Intel's GPUs. No file of i915 or xe has the product's name."""

    name = "intel"
    resource_prefix = RESOURCE_PREFIX
    harmless_resources = HARMLESS_RESOURCES
    memory_files = ("tile0/physical_vram_size_bytes",)
    """A file of the driver xe (xe_vram.c in the kernel)."""
