"""The record of detached GPUs. A GPU stays in it until it leaves the PCI bus, or is attached again.

The record is in /run: after a boot of the host it would say nothing about the devices that are plugged in then. To keep
a GPU from machines permanently, use the configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from agent.model.errors import ObservationError
from agent.model.facts import Absent, Broken, Unseen
from agent.model.paths import DETACHED_GPUS
from agent.system.damage import count, write_record
from agent.system.files import System
from agent.system.seen import look


class _Note(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    device: int
    draining: bool


_ADAPTER: TypeAdapter[dict[str, _Note]] = TypeAdapter(dict[str, _Note])


@dataclass(frozen=True, slots=True)
class Detached:
    """PCI addresses of detached GPUs."""

    gpus: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    """Those that processes may still open until the last one of them has ended."""
    problem: str = ""
    """Why the record was discarded; empty if it was not."""


def observe_detached(system: System) -> Detached:
    """Return the detached GPUs. Raises ObservationError if reading fails, so that none of them is granted."""
    try:
        notes = _noted(system)
    except (ValidationError, IsADirectoryError) as error:
        count(DETACHED_GPUS)
        why = f"{error.error_count()} errors" if isinstance(error, ValidationError) else "a directory"
        what = f"{DETACHED_GPUS}: {why}; discarding the note of detached GPUs"
        return Detached(problem=f"{what}: repeat `unbounded-agent gpus detach`")
    except OSError as error:
        raise ObservationError(f"{DETACHED_GPUS}: {error.strerror or error}") from error
    return Detached(frozenset(notes), frozenset(address for address, note in notes.items() if note.draining))


def note_detached(system: System, address: str, *, draining: bool) -> bool:
    """Record the GPU as detached; False if it is not there. Raises OSError. The caller holds the lock of passes."""
    device = _device(system, address)
    if device is not None:
        _write(system, {**_known(system), address: _Note(device=device, draining=draining)})
    return device is not None


def forget_detached(system: System, address: str) -> None:
    """Remove the GPU from the record. Raises OSError. The caller holds the lock of passes."""
    _write(system, {each: note for each, note in _known(system).items() if each != address})


def _write(system: System, notes: Mapping[str, _Note]) -> None:
    # World-readable: `plan` and `status` work as any user.
    write_record(system, DETACHED_GPUS, _ADAPTER.dump_json(dict(notes)))


def _known(system: System) -> Mapping[str, _Note]:
    try:
        return _noted(system)
    except (ValidationError, IsADirectoryError):
        return {}


def _noted(system: System) -> Mapping[str, _Note]:
    data = look(system.read, DETACHED_GPUS)
    if isinstance(data, Absent):
        return {}
    if isinstance(data, Broken):
        raise IsADirectoryError(data.why)
    if isinstance(data, Unseen):
        raise OSError(data.why)
    found = _ADAPTER.validate_json(data)
    return {address: note for address, note in found.items() if _device(system, address) == note.device}


def _device(system: System, address: str) -> int | None:
    """Return the inode of the device's sysfs link, which differs for the next device at the same address.

    kernfs gives inode numbers in a cycle (fs/kernfs/dir.c, idr_alloc_cyclic): a removed one does not return soon.
    """
    return system.link_inode(f"/sys/bus/pci/devices/{address}")
