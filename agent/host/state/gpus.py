"""Keeps the record of detached GPUs.

A GPU stays in the record until the GPU is removed from the PCI bus, or attached again. The record is in /run, so that a
reboot of the host clears it: by then, other devices may be plugged in. To keep a GPU from machines permanently, use the
configuration.
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager

from msgspec import Struct, field

from agent.host.state.locks import locked
from agent.host.state.records import Record, first_intact
from agent.model.errors import DocumentError, ObservationError
from agent.model.facts import Absent, Broken, GpuFault, Granted, Remembered, Seen, Tainted, Unseen, parse_remembered
from agent.model.paths import DETACHED_GPUS, GPU_FAULTS, GPU_FAULTS_LOCK, LOST_GPUS, PCI_DEVICES, REMEMBERED_GPUS
from agent.system.files import System
from agent.system.trust import count, read_seen


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


# Keeps in /run which GPUs the kernel log reported lost, and how far the log was read.
#
# The log shows only the event, so without the record the service would not know of the loss after a restart.


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


# Keeps in /run which GPUs had a fatal error in the kernel log.
#
# An error counts until the GPU's driver is unbound: the GPU leaves the bus, or the driver is unloaded. If a GPU was
# reset without either, `gpus attach` removes it from the record. A reboot of the host clears the whole record.


LOCK_WAIT = 5.0
"""Seconds to wait for another writer, which needs milliseconds."""


class _Fault(GpuFault, frozen=True):
    binding: int
    """What agent.host.state.gpus.binding returned when the error was recorded."""


_GPU_FAULTS_RECORD = Record(dict[str, _Fault])


def observe_faults(system: System) -> Mapping[str, GpuFault]:
    """Return the last fatal error by PCI address. GPUs whose driver was unbound since then are left out.

    Raises ObservationError if the record cannot be read: a failed GPU must not count as healthy.
    """
    return {
        address: GpuFault(each.reason, each.meaning, each.since)
        for address, each in _gpu_faults_recorded(system).items()
    }


def record_fault(system: System, address: str, fault: GpuFault) -> bool:
    """Record a fatal error, unless it is recorded already or the GPU has no driver.

    Return whether the record changed. Raises OSError, or AgentError if another process keeps the lock or the record
    cannot be read.
    """
    with _lock(system):
        bound, recorded = binding(system, address), _gpu_faults_recorded(system)
        # If only the meaning of the error is new, record the error again: where a reset was enough before, a reboot may
        # be needed now.
        known = recorded.get(address)
        if bound is None or (known and (known.reason, known.meaning) == (fault.reason, fault.meaning)):
            return False
        new = _Fault(fault.reason, fault.meaning, fault.since, bound)
        _GPU_FAULTS_RECORD.write(GPU_FAULTS, {**recorded, address: new}, system)
        return True


def forget_fault(system: System, address: str) -> bool:
    """Remove a GPU from the record, and return whether it was there. Raises what `record_fault` raises."""
    with _lock(system):
        recorded = _gpu_faults_recorded(system)
        if address not in recorded:
            return False
        _GPU_FAULTS_RECORD.write(
            GPU_FAULTS, {each: fault for each, fault in recorded.items() if each != address}, system
        )
        return True


def _lock(system: System) -> AbstractContextManager[None]:
    return locked(system, GPU_FAULTS_LOCK, LOCK_WAIT, "the record of GPUs' fatal errors is in use")


def _gpu_faults_recorded(system: System) -> dict[str, _Fault]:
    # A damaged record counts as empty: otherwise no pass would be possible as long as the damaged file exists.
    found = _GPU_FAULTS_RECORD.read_known(GPU_FAULTS, system) or {}
    return {address: each for address, each in found.items() if binding(system, address) == each.binding}


# Reads the record of the GPUs that machines were last granted, from the first intact copy of two.


def observe_remembered(system: System) -> tuple[Seen[Remembered], str]:
    """Return the record, and what is wrong with its copies (empty if nothing is).

    Without an intact copy, the record is Unseen if a copy could not be read, Broken if one is damaged, and empty if
    both are missing.
    """
    copies = [_copy(path, system) for path in REMEMBERED_GPUS]
    problems = "; ".join(each.why for each in copies if isinstance(each, Broken | Unseen))
    found = first_intact(copies)
    match found:
        case Remembered():
            return found, f"{problems}; the other copy of this record is used" if problems else ""
        case Absent():
            return Remembered(), ""
        case _:
            return type(found)(problems), problems


def _copy(path: str, system: System) -> Seen[Remembered]:
    data = read_seen(system.read, path)
    try:
        found = parse_remembered(path, data) if isinstance(data, bytes) else data
    except DocumentError as error:
        found = Broken(str(error))
    if isinstance(found, Broken):
        count(path, system)
    return found


# Format of the record of the last grant that was published to a machine. Pure.


GRANTED = Record(Granted, 1)
