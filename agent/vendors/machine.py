"""The vendors that the machine half knows: the only place to add one.

Each is loaded where a machine has to do with it: a run that changes nothing takes little longer than loading its code.
"""

from agent.vendors.machine_protocol import CdiModes, MachineVendor

VENDOR_NAMES = ("nvidia", "amd", "intel")
OTHER_DEVICES = "other-devices"
"""In the place of a vendor, in a request for devices that are no GPUs (agent.inside.other_devices settles those)."""


def machine_vendor(name: str) -> MachineVendor | None:
    """None for one that this release does not know."""
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


def cdi_modes(name: str) -> CdiModes | None:
    """None for a vendor whose generator makes specs of GPUs alone."""
    if name != "nvidia":
        return None
    from agent.vendors.nvidia.cdi_modes import NvidiaModes

    return NvidiaModes()
