"""GPUs that an administrator takes out of use: noted until they have gone from PCI, or are given back.

In /run: a boot of the host finds all devices anew, so that nothing of before says anything of what is plugged then. To
keep a GPU from machines for good is configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from agent.errors import ObservationError
from agent.paths import DETACHED_GPUS
from agent.system.files import System


class _Note(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    device: int
    draining: bool


_ADAPTER: TypeAdapter[dict[str, _Note]] = TypeAdapter(dict[str, _Note])


@dataclass(frozen=True, slots=True)
class Detached:
    """PCI addresses."""

    gpus: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    """Those of them that processes may go on to open until the last one has ended."""
    problem: str = ""
    """Why what was noted is not taken."""


def observe_detached(system: System) -> Detached:
    """Raises ObservationError when the look failed: what is about to be removed must not be granted for that."""
    try:
        notes = _noted(system)
    except ValidationError as error:
        what = f"{DETACHED_GPUS}: {error.error_count()} errors; the note of detached GPUs is discarded"
        return Detached(problem=f"{what}: repeat `unbounded-agent gpus detach`")
    except OSError as error:
        raise ObservationError(f"{DETACHED_GPUS}: {error.strerror or error}") from error
    return Detached(frozenset(notes), frozenset(address for address, note in notes.items() if note.draining))


def note_detached(system: System, address: str, *, draining: bool) -> bool:
    """False when no such device is there. Raises OSError. The caller holds the lock of passes."""
    device = _device(system, address)
    if device is not None:
        _write(system, {**_known(system), address: _Note(device=device, draining=draining)})
    return device is not None


def forget_detached(system: System, address: str) -> None:
    """Raises OSError. The caller holds the lock of passes."""
    _write(system, {each: note for each, note in _known(system).items() if each != address})


def _write(system: System, notes: Mapping[str, _Note]) -> None:
    # World-readable: `plan` and `status` work as any user.
    system.write(DETACHED_GPUS, _ADAPTER.dump_json(dict(notes)))


def _known(system: System) -> Mapping[str, _Note]:
    try:
        return _noted(system)
    except ValidationError:
        return {}


def _noted(system: System) -> Mapping[str, _Note]:
    try:
        found = _ADAPTER.validate_json(system.read(DETACHED_GPUS))
    except FileNotFoundError:
        return {}
    return {address: note for address, note in found.items() if _device(system, address) == note.device}


def _device(system: System, address: str) -> int | None:
    """Tells a device from the next one at its address: sysfs makes the link anew, with a new number.

    kernfs gives inode numbers in a cycle (fs/kernfs/dir.c, idr_alloc_cyclic): a removed one does not soon return.
    """
    return system.link_inode(f"/sys/bus/pci/devices/{address}")
