"""AMD on the host."""

from agent.model.device import DeviceKind
from agent.vendors.drm.description import Description, SharedNode
from agent.vendors.drm.host import DrmHost

PROCESSING_ACCELERATOR = 0x1200
"""Class of an Instinct from MI200 on; amdgpu takes it by this class (pciidlist in amdgpu_drv.c)."""
KFD = SharedNode("/dev/kfd", DeviceKind.KFD, "kfd", "ROCm cannot compute")

AMD = DrmHost(
    Description(
        name="amd",
        title="AMD",
        # Not 0x1022, the processors' id. AMD's own tools do not know the driver radeon, for GPUs before 2012.
        vendor_id=0x1002,
        drivers=("amdgpu",),
        firmware="Debian: firmware-amd-graphics; Ubuntu: linux-firmware",
        further_classes=(PROCESSING_ACCELERATOR,),
        shared=(KFD,),
    )
)
