"""Reads from sysfs the facts that agent.dra publishes about GPUs that need only device nodes."""

from collections.abc import Mapping, Sequence
from functools import partial

from agent.model.contract import AllocatableDevice
from agent.model.paths import PCI_DEVICES
from agent.model.text import whole_number
from agent.system.deadlines import read_device_texts
from agent.system.files import System
from agent.vendors.dra_vendor import FACTS_LIMIT, Attribute, DeviceFacts, DraVendor, semantic_version
from agent.vendors.drm.machine import AMD_PREFIX, HARMLESS_RESOURCES, RESOURCE_PREFIX


def read_facts(
    files: Mapping[str, str],
    memory: str,
    system: System,
    devices: Sequence[AllocatableDevice],
    driver_version: str,
) -> Mapping[AllocatableDevice, DeviceFacts]:
    """Return what is known. `files` has files by attribute, and `memory` is the file with the size of the GPU's memory.

    All are in the GPU's directory in PCI_DEVICES. A driver may lack any of them.
    """
    found = {}
    for device in devices:
        paths = [f"{PCI_DEVICES}/{device.pci_address}/{each}" for each in (*files.values(), memory)]
        # Each file that hangs halves the time for the next one. So even if all files hang, this takes little more than
        # FACTS_LIMIT.
        *texts, size = read_device_texts(system, paths, FACTS_LIMIT / 2)
        attributes: dict[str, Attribute] = {}
        if version := semantic_version(driver_version):
            attributes["driverVersion"] = version
        attributes |= {name: text for name, each in zip(files, texts, strict=True) if (text := _printable(each))}
        capacity = whole_number(_printable(size))
        # A file that does not exist will not appear later, so the facts are complete without it. But a driver that did
        # not answer may answer later.
        complete = all(isinstance(each, str | FileNotFoundError) for each in (*texts, size))
        found[device] = DeviceFacts(attributes, {"memory": capacity} if capacity else {}, complete)
    return found


def _printable(text: str | OSError) -> str:
    """Return a file's text without the newline; empty if the file could not be read or the text is not printable."""
    stripped = text.strip() if isinstance(text, str) else ""
    return stripped if stripped.isprintable() else ""


# The files are amdgpu's (amdgpu_device.c, amdgpu_vram_mgr.c, amdgpu_pm.c in the kernel).
AMD_FILES = {"productName": "product_name", "uuid": "unique_id", "pciDevice": "device"}
AMD = DraVendor("amd", partial(read_facts, AMD_FILES, "mem_info_vram_total"), AMD_PREFIX)
# No file of i915 or xe has the product's name. The file with the memory is of xe (xe_vram.c in the kernel).
INTEL_FILES = {"pciDevice": "device"}
INTEL = DraVendor(
    "intel", partial(read_facts, INTEL_FILES, "tile0/physical_vram_size_bytes"), RESOURCE_PREFIX, HARMLESS_RESOURCES
)
