"""GPUs that the kernel log called lost, and how far it was read. Kept in /run: a log line is an event, not a state."""

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, TypeAdapter

from agent.host.state.record import Record
from agent.model.paths import KERNEL_LOG_READ, LOST_GPUS
from agent.system.files import System


class _Lost(BaseModel):
    why: str
    binding: int


class LogRead(BaseModel):
    """How far the kernel log was read, and the driver bindings at that time."""

    sequence: int
    """Number of the last record."""
    bindings: dict[str, int]
    """Result of `binding` by PCI address, for GPUs that a driver is bound to."""


_LOST = Record(TypeAdapter(dict[str, _Lost]))
_LOG_READ = Record(TypeAdapter(LogRead))


def observe_lost(system: System) -> Mapping[str, str]:
    """Return the log's message by PCI address, without GPUs whose driver was bound again since."""
    return {address: lost.why for address, lost in _recorded(system).items()}


def record_lost(system: System, address: str, why: str) -> bool:
    """Record a lost GPU; False if no driver is bound to it, which is a condition of its own. Raises OSError."""
    bound = binding(system, address)
    if bound is None:
        return False
    _LOST.write(LOST_GPUS, {**_recorded(system), address: _Lost(why=why, binding=bound)}, system)
    return True


def log_read(system: System) -> LogRead | None:
    """Return the record of this boot of the host; None without a usable one."""
    return _LOG_READ.read(KERNEL_LOG_READ, system)


def keep_log_read(system: System, read: LogRead) -> None:
    """Write the record. Raises OSError."""
    _LOG_READ.write(KERNEL_LOG_READ, read, system)


def bindings(system: System, addresses: Iterable[str]) -> dict[str, int]:
    """Return bindings by PCI address, for devices that a driver is bound to."""
    found = {address: binding(system, address) for address in addresses}
    return {address: bound for address, bound in found.items() if bound is not None}


def _recorded(system: System) -> dict[str, _Lost]:
    # The record only covers this boot; without it, the conditions of nodes, driver and pods remain.
    found = _LOST.read(LOST_GPUS, system) or {}
    return {address: lost for address, lost in found.items() if binding(system, address) == lost.binding}


def binding(system: System, address: str) -> int | None:
    """Return the inode of the device's sysfs link `driver`, which differs for each binding; None without a driver.

    kernfs gives inode numbers in a cycle (fs/kernfs/dir.c, idr_alloc_cyclic): a removed one does not return soon.
    """
    return system.link_inode(f"/sys/bus/pci/devices/{address}/driver")
