"""Lists the vendors that the machine half supports. New vendors are added only here.

A vendor's module is imported only if it is needed, because a run that changes nothing spends most of its time on
loading code.
"""

from collections.abc import Mapping

from agent.vendors.machine_vendor import MachineVendor

VENDOR_NAMES = ("nvidia", "amd", "intel")
GPU_NODES: Mapping[str, tuple[str, ...]] = {
    "nvidia": ("nvidia*", "nvidia-caps/*", "nvidia-caps-imex-channels/*", "dri/*"),
    "amd": ("kfd", "dri/*"),
    "intel": ("dri/*",),
}
"""By vendor, patterns (fnmatch) of the paths of nodes below /dev. A node that matches, and that is bound into the
machine although the handoff does not name it, is withdrawn."""


def machine_vendor(name: str) -> MachineVendor | None:
    """Return the vendor of this name; None if this release does not know it."""
    match name:
        case "nvidia":
            from agent.vendors.nvidia.machine import NvidiaMachine

            return NvidiaMachine()
        case "amd":
            from agent.vendors.drm.machine import AmdMachine

            return AmdMachine()
        case "intel":
            from agent.vendors.drm.machine import IntelMachine

            return IntelMachine()
        case _:
            return None
