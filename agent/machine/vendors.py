"""Lists the vendors of the machine half, as agent.host.vendors and agent.dra.inventory do for the other parts."""

from collections.abc import Mapping

from agent.vendors.drm.machine import AmdMachine, IntelMachine
from agent.vendors.machine_vendor import MachineVendor
from agent.vendors.nvidia.machine import NvidiaMachine

VENDORS: Mapping[str, MachineVendor] = {each.name: each for each in (NvidiaMachine(), AmdMachine(), IntelMachine())}
GPU_NODES: Mapping[str, tuple[str, ...]] = {
    "nvidia": ("nvidia*", "nvidia-caps/*", "nvidia-caps-imex-channels/*", "dri/*"),
    "amd": ("kfd", "dri/*"),
    "intel": ("dri/*",),
}
"""By vendor, patterns (fnmatch) of the paths of nodes below /dev. A node that matches, and that is bound into the
machine although the handoff does not name it, is withdrawn."""
