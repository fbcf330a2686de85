"""What the kernel's log said of lost GPUs, and how far it was read: kept in /run, as a log line is no state."""

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, TypeAdapter, ValidationError

from agent.paths import KERNEL_LOG_READ, LOST_GPUS
from agent.system.files import System


class _Lost(BaseModel):
    why: str
    binding: int


class LogRead(BaseModel):
    """How far the kernel's log was read, and what the GPUs were bound to then."""

    sequence: int
    """Of the last record."""
    bindings: dict[str, int]
    """By PCI address, of those that a driver is bound to; as `binding` tells them."""


_ADAPTER: TypeAdapter[dict[str, _Lost]] = TypeAdapter(dict[str, _Lost])


def observe_lost(system: System) -> Mapping[str, str]:
    """What was said of each, by PCI address; not of those whose driver was bound anew since."""
    return {address: lost.why for address, lost in _recorded(system).items()}


def record_lost(system: System, address: str, why: str) -> bool:
    """Keep that a GPU is lost; False when no driver is bound to it, which is a condition of its own. Raises OSError."""
    bound = binding(system, address)
    if bound is None:
        return False
    lost = {**_recorded(system), address: _Lost(why=why, binding=bound)}
    system.write(LOST_GPUS, _ADAPTER.dump_json(lost))
    return True


def log_read(system: System) -> LogRead | None:
    """As it was kept in this boot of the host; None where that is not known."""
    try:
        return LogRead.model_validate_json(system.read(KERNEL_LOG_READ))
    except (OSError, ValidationError):
        return None


def keep_log_read(system: System, read: LogRead) -> None:
    """Raises OSError."""
    system.write(KERNEL_LOG_READ, read.model_dump_json().encode())


def bindings(system: System, addresses: Iterable[str]) -> dict[str, int]:
    """Of those that a driver is bound to, by PCI address."""
    found = {address: binding(system, address) for address in addresses}
    return {address: bound for address, bound in found.items() if bound is not None}


def _recorded(system: System) -> dict[str, _Lost]:
    try:
        found = _ADAPTER.validate_json(system.read(LOST_GPUS))
    except (OSError, ValidationError):
        # Only a memory of this boot: without it the conditions of nodes, driver and pods are all that is known.
        return {}
    return {address: lost for address, lost in found.items() if binding(system, address) == lost.binding}


def binding(system: System, address: str) -> int | None:
    """Tells one binding of a driver to the device from the next: sysfs makes the link `driver` anew, with a new number.

    kernfs gives inode numbers in a cycle (fs/kernfs/dir.c, idr_alloc_cyclic): a removed one does not soon return.
    """
    return system.link_inode(f"/sys/bus/pci/devices/{address}/driver")
