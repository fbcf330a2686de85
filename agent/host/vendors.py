"""The vendors that the host half supports."""

from agent.vendors.drm.host import AMD, INTEL
from agent.vendors.host_vendor import HostVendor
from agent.vendors.nvidia.driver import load
from agent.vendors.nvidia.host import NVIDIA
from agent.vendors.other_devices import OTHER

HOST_VENDORS: tuple[HostVendor, ...] = (NVIDIA, AMD, INTEL, OTHER)

load_gpu_modules = load
"""Loads kernel modules and makes device nodes, if `driver.load_modules` is set. Only NVIDIA's modules need this: AMD's
and Intel's belong to the kernel, which loads them by itself."""


def rank(name: str) -> int:
    """Return the vendor's place in the order in which `count=N` takes GPUs."""
    return [vendor.name for vendor in HOST_VENDORS].index(name)


def host_vendor(name: str) -> HostVendor:
    """Return the vendor of this name. Raises KeyError for an unknown name."""
    return {vendor.name: vendor for vendor in HOST_VENDORS}[name]
