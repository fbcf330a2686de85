"""The attributes of AMD's GPUs for Dynamic Resource Allocation."""

from agent.vendors.drm.dra import DrmDra


class AmdDra(DrmDra):
    """AMD's GPUs. The files are amdgpu's (amdgpu_device.c, amdgpu_vram_mgr.c, amdgpu_pm.c in the kernel)."""

    name = "amd"
    resource_prefix = "amd.com/"
    product_file = "product_name"
    unique_id_file = "unique_id"
    memory_files = ("mem_info_vram_total",)
