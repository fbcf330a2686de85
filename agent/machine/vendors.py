"""The vendors that the machine half knows: the only place to add one.

Each is imported only if a machine needs it: a run that changes nothing takes little longer than loading its code.
"""

from collections.abc import Mapping

from agent.vendors.machine_vendor import MachineVendor

VENDOR_NAMES = ("nvidia", "amd", "intel")
GPU_NODES: Mapping[str, tuple[str, ...]] = {
    "nvidia": ("nvidia*", "nvidia-caps/*", "nvidia-caps-imex-channels/*", "dri/*"),
    "amd": ("kfd", "dri/*"),
    "intel": ("dri/*",),
}
"""By vendor: nodes below /dev (fnmatch patterns) that a machine has only by a grant; no setting names them."""


def machine_vendor(name: str) -> MachineVendor | None:
    """Return a vendor; None for one that this release does not know."""
    match name:
        case "nvidia":
            from agent.vendors.nvidia.machine import NvidiaMachine

            return NvidiaMachine()
        case "amd":
            from agent.vendors.amd.machine import AmdMachine

            return AmdMachine()
        case "intel":
            from agent.vendors.intel.machine import IntelMachine

            return IntelMachine()
        case _:
            return None
