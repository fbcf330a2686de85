"""The attributes of Intel's GPUs for Dynamic Resource Allocation."""

from agent.vendors.drm.dra import DrmDra
from agent.vendors.intel.device_plugin import HARMLESS_RESOURCES, RESOURCE_PREFIX


class IntelDra(DrmDra):
    """Intel's GPUs. No file of i915 or xe has the product's name."""

    name = "intel"
    resource_prefix = RESOURCE_PREFIX
    harmless_resources = HARMLESS_RESOURCES
    memory_files = ("tile0/physical_vram_size_bytes",)
    """A file of the driver xe (xe_vram.c in the kernel)."""
