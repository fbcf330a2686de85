"""The vendors that the host half supports."""

from collections.abc import Callable, Set

from agent.model.facts import PciDevice, Seen
from agent.system.files import System
from agent.vendors.drm.host import AMD, INTEL
from agent.vendors.host_vendor import HostVendor
from agent.vendors.nvidia.driver import load
from agent.vendors.nvidia.host import NVIDIA
from agent.vendors.other_devices import OTHER

HOST_VENDORS: tuple[HostVendor, ...] = (NVIDIA, AMD, INTEL, OTHER)

Loader = Callable[[System, Callable[[], Seen[tuple[PciDevice, ...]]], Set[str], Callable[[str], None]], None]
"""Loads a vendor's kernel modules and makes its device nodes. Takes the system, a function that lists PCI devices, the
addresses of detached GPUs, and a function that reports progress. Raises AgentError or OSError."""

LOADERS: tuple[Loader, ...] = (load,)
"""Loaders of kernel modules, used if `driver.load_modules` is set. Only NVIDIA's modules need one: AMD's and Intel's
belong to the kernel, which loads them by itself."""


def rank(name: str) -> int:
    """Return the vendor's place in the order in which `count=N` takes GPUs."""
    return [vendor.name for vendor in HOST_VENDORS].index(name)


def host_vendor(name: str) -> HostVendor:
    """Return the vendor of this name. Raises KeyError for an unknown name."""
    return {vendor.name: vendor for vendor in HOST_VENDORS}[name]
