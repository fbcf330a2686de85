"""Intel on the host."""

from agent.vendors.drm.description import Description
from agent.vendors.drm.host import DrmHost

INTEL = DrmHost(
    Description(
        name="intel",
        title="Intel",
        vendor_id=0x8086,
        drivers=("i915", "xe"),
        firmware="Debian: firmware-misc-nonfree, from 13 on firmware-intel-graphics; Ubuntu: linux-firmware",
    )
)
