"""Reads from sysfs the facts that agent.dra publishes about GPUs that need only device nodes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from agent.model.contract import AllocatableDevice
from agent.model.paths import PCI_DEVICES
from agent.model.text import whole_number
from agent.system.deadlines import read_device_texts
from agent.system.files import System
from agent.vendors.dra_vendor import FACTS_LIMIT, Attribute, DeviceFacts, DraVendor, semantic_version
from agent.vendors.drm.machine import AMD_PREFIX, HARMLESS_RESOURCES, RESOURCE_PREFIX


class Files(NamedTuple):
    """A driver's files in a GPU's directory in PCI_DEVICES. A driver may lack any of them."""

    product: str = ""
    """The product's name."""
    unique_id: str = ""
    """The GPU's permanent id."""
    memory: tuple[str, ...] = ()
    """Files that may have the size of the GPU's own memory in bytes. The first number other than 0 is used."""


def read_facts(
    files: Files, system: System, devices: Sequence[AllocatableDevice], driver_version: str
) -> Mapping[AllocatableDevice, DeviceFacts]:
    return {each: _facts(files, system, each, driver_version) for each in devices}


def _facts(files: Files, system: System, device: AllocatableDevice, driver_version: str) -> DeviceFacts:
    names = [each for each in (files.product, files.unique_id, "device", *files.memory) if each]
    paths = [f"{PCI_DEVICES}/{device.pci_address}/{each}" for each in names]
    # Each file that hangs halves the time for the next one. So even if all files hang, this takes little more than
    # FACTS_LIMIT.
    texts = dict(zip(names, read_device_texts(system, paths, FACTS_LIMIT / 2), strict=True))
    attributes: dict[str, Attribute] = {}
    if version := semantic_version(driver_version):
        attributes["driverVersion"] = version
    for name, file in (("productName", files.product), ("uuid", files.unique_id), ("pciDevice", "device")):
        if text := _printable(texts.get(file, "")):
            attributes[name] = text
    memory = next((size for each in files.memory if (size := whole_number(_printable(texts[each])))), 0)
    # A file that does not exist will not appear later, so the facts are complete without it. But a driver that did not
    # answer may answer later.
    complete = all(isinstance(each, str | FileNotFoundError) for each in texts.values())
    return DeviceFacts(attributes, {"memory": memory} if memory else {}, complete)


def _printable(text: str | OSError) -> str:
    """Return a file's text without the newline; empty if the file could not be read or the text is not printable."""
    stripped = text.strip() if isinstance(text, str) else ""
    return stripped if stripped.isprintable() else ""


# The files are amdgpu's (amdgpu_device.c, amdgpu_vram_mgr.c, amdgpu_pm.c in the kernel).
AMD_FILES = Files("product_name", "unique_id", ("mem_info_vram_total",))
AMD = DraVendor("amd", partial(read_facts, AMD_FILES), AMD_PREFIX)
# No file of i915 or xe has the product's name. The file is of xe (xe_vram.c in the kernel).
INTEL_FILES = Files(memory=("tile0/physical_vram_size_bytes",))
INTEL = DraVendor("intel", partial(read_facts, INTEL_FILES), RESOURCE_PREFIX, HARMLESS_RESOURCES)
