"""The attributes of Intel's GPUs for Dynamic Resource Allocation."""

from agent.vendors.drm.dra import DrmDra


class IntelDra(DrmDra):
    """Intel's GPUs. No file of i915 or xe has the product's name."""

    name = "intel"
    resource_prefix = "gpu.intel.com/"
    harmless_resources = ("gpu.intel.com/*_monitoring",)
    """Resources with which a pod can monitor all GPUs."""
    memory_files = ("tile0/physical_vram_size_bytes",)
    """A file of the driver xe (xe_vram.c in the kernel)."""
