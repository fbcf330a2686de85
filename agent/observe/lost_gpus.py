"""GPUs that the kernel's log said to be lost: kept in /run, as a log line is no state that could be looked at again."""

from collections.abc import Mapping

from pydantic import BaseModel, TypeAdapter, ValidationError

from agent.paths import LOST_GPUS
from agent.system.files import System


class _Lost(BaseModel):
    why: str
    binding: int


_ADAPTER: TypeAdapter[dict[str, _Lost]] = TypeAdapter(dict[str, _Lost])


def observe_lost(system: System) -> Mapping[str, str]:
    """What was said of each, by PCI address; not of those whose driver was bound anew since."""
    return {address: lost.why for address, lost in _recorded(system).items()}


def record_lost(system: System, address: str, why: str) -> bool:
    """Keep that a GPU is lost; False when no driver is bound to it, which is a condition of its own. Raises OSError."""
    binding = _binding(system, address)
    if binding is None:
        return False
    lost = {**_recorded(system), address: _Lost(why=why, binding=binding)}
    system.write(LOST_GPUS, _ADAPTER.dump_json(lost))
    return True


def _recorded(system: System) -> dict[str, _Lost]:
    try:
        found = _ADAPTER.validate_json(system.read(LOST_GPUS))
    except (OSError, ValidationError):
        # Only a memory of this boot: without it the conditions of nodes, driver and pods are all that is known.
        return {}
    return {address: lost for address, lost in found.items() if _binding(system, address) == lost.binding}


def _binding(system: System, address: str) -> int | None:
    """Tells one binding of a driver to the device from the next: sysfs makes the link `driver` anew, with a new number.

    kernfs gives inode numbers in a cycle (fs/kernfs/dir.c, idr_alloc_cyclic): a removed one does not soon return.
    """
    return system.link_inode(f"/sys/bus/pci/devices/{address}/driver")
