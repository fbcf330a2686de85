"""Every vendor that the host half knows."""

from agent.vendors.amd.host import AMD
from agent.vendors.intel.host import INTEL
from agent.vendors.nvidia.host import NVIDIA
from agent.vendors.other.host import OTHER
from agent.vendors.protocols import HostVendor

HOST_VENDORS: tuple[HostVendor, ...] = (NVIDIA, AMD, INTEL, OTHER)


def rank(name: str) -> int:
    """Its place among all: the order in which a number of GPUs is taken."""
    return [vendor.name for vendor in HOST_VENDORS].index(name)


def host_vendor(name: str) -> HostVendor:
    """Raises KeyError for a name that no vendor has."""
    return {vendor.name: vendor for vendor in HOST_VENDORS}[name]
