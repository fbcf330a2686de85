"""Lists the vendors whose GPUs can be offered. New vendors are added only here."""

from agent.vendors.amd.dra import AmdDra
from agent.vendors.dra_vendor import DraVendor
from agent.vendors.intel.dra import IntelDra
from agent.vendors.nvidia.dra import NvidiaDra

DRA_VENDORS: tuple[DraVendor, ...] = (NvidiaDra(), AmdDra(), IntelDra())


def dra_vendor(name: str) -> DraVendor | None:
    """Return the vendor of this name; None if this release does not know it."""
    return next((each for each in DRA_VENDORS if each.name == name), None)
