"""Keeps the record of detached GPUs.

A GPU stays in the record until the GPU is removed from the PCI bus, or attached again. The record is in /run, so that a
reboot of the host clears it: by then, other devices may be plugged in. To keep a GPU from machines permanently, use the
configuration.
"""

import time
from collections.abc import Mapping

from msgspec import Struct, field

from agent.host.state.record import Record
from agent.model.errors import ObservationError
from agent.model.facts import Absent, Broken, Unseen
from agent.model.gpu_facts import Tainted
from agent.model.paths import DETACHED_GPUS, PCI_DEVICES
from agent.system.damage import count
from agent.system.files import System


class _Note(Struct, frozen=True, omit_defaults=True):
    """One GPU in the record. `evict` and `since` are those of Tainted."""

    device: int
    """What `_device` returned when the GPU was recorded."""
    draining: bool
    """The GPU is detached, but processes may still use it until the last of them has exited."""
    granted: bool = False
    """The GPU is only tainted so far: machines still have it."""
    evict: bool = False
    since: float = 0.0


# The file is world-readable, because `plan` and `status` work as any user.
_RECORD = Record(dict[str, _Note])


class Detached(Struct, frozen=True):
    """What the record says, by PCI address."""

    gpus: frozenset[str] = frozenset()
    """Detached GPUs."""
    draining: frozenset[str] = frozenset()
    """Detached GPUs that processes may still use until the last of these processes has exited."""
    tainted: Mapping[str, Tainted] = field(default_factory=dict)
    """All GPUs that no new pod may get: those in `gpus`, and those that are only tainted so far."""
    problem: str = ""
    """Why the record was discarded; empty if it was not."""


def observe_detached(system: System) -> Detached:
    """Return the detached GPUs. A damaged record is discarded: then there are none, and `problem` says why.

    Raises ObservationError if the record cannot be read now. It is then unknown which GPUs are detached, and a detached
    GPU must not be granted.
    """
    try:
        notes = _read_record(system)
    except OSError as error:
        raise ObservationError(f"{DETACHED_GPUS}: {error.strerror or error}") from error
    if isinstance(notes, Broken):
        count(DETACHED_GPUS, system)
        what = f"{notes.why}; discarding the record of detached GPUs"
        return Detached(problem=f"{what}: run `unbounded-agent gpus detach` again for each of them")
    detached = {address: note for address, note in notes.items() if not note.granted}
    return Detached(
        frozenset(detached),
        frozenset(address for address, note in detached.items() if note.draining),
        {address: Tainted(note.evict, note.since) for address, note in notes.items()},
    )


def record_detached(system: System, address: str, *, draining: bool) -> bool:
    """Record the GPU as detached, if it exists. Return whether it exists. Raises OSError.

    The caller must hold the pass lock.
    """
    return _record(system, address, draining=draining)


def record_tainted(system: System, address: str, *, evict: bool) -> bool:
    """Record that no new pod may get the GPU, although machines still have it. Otherwise like `record_detached`."""
    return _record(system, address, draining=False, granted=True, evict=evict)


def _record(system: System, address: str, *, draining: bool, granted: bool = False, evict: bool | None = None) -> bool:
    """Record the GPU with these values, if it exists. Return whether it exists.

    `granted` means that the GPU is only to be tainted: machines keep it. If the GPU is in the record already, `since`
    stays, and so does `evict` unless it is given: `gpus detach` may first taint a GPU, and detach it later.

    A GPU that is recorded as detached already stays detached even with `granted`, because somebody may pull it out at
    any time. In that case, its recorded `draining` stays too, because processes may still use the GPU.
    """
    device, notes = _device(system, address), _usable_record(system)
    if device is not None:
        before = notes.get(address) or _Note(device, draining, granted, since=time.time())
        still_granted, draining = granted and before.granted, before.draining if granted else draining
        note = _Note(device, draining, still_granted, before.evict if evict is None else evict, before.since)
        _RECORD.write(DETACHED_GPUS, {**notes, address: note}, system)
    return device is not None


def forget_detached(system: System, address: str) -> None:
    """Remove the GPU from the record. Raises OSError. The caller must hold the pass lock."""
    others = {each: note for each, note in _usable_record(system).items() if each != address}
    _RECORD.write(DETACHED_GPUS, others, system)


def _usable_record(system: System) -> Mapping[str, _Note]:
    """Return the record; empty if it is damaged. Raises OSError."""
    notes = _read_record(system)
    return {} if isinstance(notes, Broken) else notes


def _read_record(system: System) -> Mapping[str, _Note] | Broken:
    """Return the record without GPUs that have left the PCI bus. Raises OSError if it cannot be read."""
    found = _RECORD.read_seen(DETACHED_GPUS, system)
    if isinstance(found, Absent):
        return {}
    if isinstance(found, Broken):
        return found
    if isinstance(found, Unseen):
        raise OSError(found.why)
    return {address: note for address, note in found.items() if _device(system, address) == note.device}


def _device(system: System, address: str) -> int | None:
    """Return the inode number of the device's sysfs link; None if there is no device at this address.

    If another device is plugged in at this address, or the same one again, its link has another inode number.

    kernfs assigns inode numbers in a cycle (fs/kernfs/dir.c, idr_alloc_cyclic), so a number is not used again soon.
    """
    return system.link_inode(f"{PCI_DEVICES}/{address}")
