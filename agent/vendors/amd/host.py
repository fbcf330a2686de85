"""AMD on the host."""

from agent.identity import DeviceKind
from agent.vendors.drm.description import Description, SharedNode
from agent.vendors.drm.host import DrmHost

PROCESSING_ACCELERATOR = 0x1200
"""What an Instinct is from MI200 on; amdgpu takes it by this class (pciidlist in amdgpu_drv.c)."""
KFD = SharedNode("/dev/kfd", DeviceKind.KFD, "kfd", "ROCm cannot compute")

AMD = DrmHost(
    Description(
        name="amd",
        title="AMD",
        # Not 0x1022, which is the processors'. The driver radeon, of GPUs before 2012, is unknown to AMD's own tools.
        vendor_id=0x1002,
        drivers=("amdgpu",),
        firmware="Debian: firmware-amd-graphics; Ubuntu: linux-firmware",
        further_classes=(PROCESSING_ACCELERATOR,),
        shared=(KFD,),
    )
)
