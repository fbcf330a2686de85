"""AMD on the host."""

from agent.model.device import DeviceKind
from agent.vendors.drm.description import Description, SharedNode
from agent.vendors.drm.host import DrmHost

PROCESSING_ACCELERATOR = 0x1200
"""PCI class by which amdgpu recognises Instinct accelerators from MI200 on (pciidlist in amdgpu_drv.c)."""
KFD = SharedNode("/dev/kfd", DeviceKind.KFD, "kfd", "ROCm cannot compute")

AMD = DrmHost(
    Description(
        name="amd",
        title="AMD",
        # AMD's GPUs have this id, AMD's processors have 0x1022.
        vendor_id=0x1002,
        # The driver radeon, for GPUs before 2012, is left out, because AMD's tools do not support it.
        drivers=("amdgpu",),
        firmware="Debian: firmware-amd-graphics; Ubuntu: linux-firmware",
        further_classes=(PROCESSING_ACCELERATOR,),
        shared=(KFD,),
        partition_mode="current_compute_partition",
        whole="SPX",
    )
)
