"""Keeps in /run which GPUs the kernel log reported lost, and how far the log was read.

The log shows only the event, so without the record the service would not know of the loss after a restart.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from agent.host.state.record import Record
from agent.model.paths import LOST_GPUS, PCI_DEVICES
from agent.system.files import System


class _Lost(Struct, frozen=True):
    why: str
    binding: int
    """What the function `binding` returned when the loss was recorded."""


class LogPosition(Struct, frozen=True):
    """How far the kernel log was read, and to which drivers GPUs were bound at that time."""

    sequence: int
    """Sequence number of the last record that was read."""
    bindings: dict[str, int]
    """Results of `binding` by PCI address, for GPUs that are bound to a driver."""


_LOST = Record(dict[str, _Lost])
LOG_POSITION = Record(LogPosition)
"""The format of the record KERNEL_LOG_READ."""


def observe_lost(system: System) -> Mapping[str, str]:
    """Return what the log said about lost GPUs, by PCI address.

    GPUs whose driver was unbound since then are left out. Raises ObservationError if the record cannot be read.
    """
    return {address: lost.why for address, lost in _recorded(system).items()}


def record_lost(system: System, address: str, why: str) -> bool:
    """Record a lost GPU, and return True.

    If the GPU has no driver, only return False: another condition reports a missing driver. Raises OSError, or
    ObservationError if the record cannot be read.
    """
    bound = binding(system, address)
    if bound is None:
        return False
    _LOST.write(LOST_GPUS, {**_recorded(system), address: _Lost(why=why, binding=bound)}, system)
    return True


def bindings(system: System, addresses: Iterable[str]) -> dict[str, int]:
    """Return the results of `binding` by PCI address, for devices that are bound to a driver."""
    found = {address: binding(system, address) for address in addresses}
    return {address: bound for address, bound in found.items() if bound is not None}


def _recorded(system: System) -> dict[str, _Lost]:
    # A damaged record counts as empty: the loss may still show in the conditions about device nodes, driver and pods.
    found = _LOST.read_known(LOST_GPUS, system) or {}
    return {address: lost for address, lost in found.items() if binding(system, address) == lost.binding}


def binding(system: System, address: str) -> int | None:
    """Return the inode number of a device's sysfs link `driver`; None if no driver is bound to the device.

    Each time that a driver is bound to the device, the number changes.

    kernfs assigns inode numbers in a cycle (fs/kernfs/dir.c, idr_alloc_cyclic), so a number is not used again soon.
    """
    return system.link_inode(f"{PCI_DEVICES}/{address}/driver")
