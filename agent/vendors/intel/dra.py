"""Intel's GPUs, for their offer by Dynamic Resource Allocation."""

from agent.vendors.drm.dra import DrmDra


class IntelDra(DrmDra):
    """Intel's GPUs. No file of i915 or xe has the product's name."""

    name = "intel"
    resource_prefix = "gpu.intel.com/"
    harmless_resources = ("gpu.intel.com/*_monitoring",)
    """They let a pod observe all GPUs."""
    memory = ("tile0/physical_vram_size_bytes",)
    """Of xe (xe_vram.c in the kernel)."""
