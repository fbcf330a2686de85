"""The vendors that the machine half knows: the only place to add one."""

from agent.vendors.machine_protocol import MachineVendor
from agent.vendors.nvidia.machine import NvidiaMachine

MACHINE_VENDORS: tuple[MachineVendor, ...] = (NvidiaMachine(),)
