"""Keeps in /run which GPUs had a fatal error in the kernel log.

An error counts until the GPU's driver is unbound: the GPU leaves the bus, or the driver is unloaded. If a GPU was reset
without either, `gpus attach` removes it from the record. A reboot of the host clears the whole record.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager

from agent.host.state.locks import locked
from agent.host.state.lost_gpus import binding
from agent.host.state.record import Record
from agent.model.gpu_facts import GpuFault
from agent.model.paths import GPU_FAULTS, GPU_FAULTS_LOCK
from agent.system.files import System

LOCK_WAIT = 5.0
"""Seconds to wait for another writer, which needs milliseconds."""


class _Fault(GpuFault, frozen=True):
    binding: int
    """What agent.host.state.lost_gpus.binding returned when the error was recorded."""


_RECORD = Record(dict[str, _Fault])


def observe_faults(system: System) -> Mapping[str, GpuFault]:
    """Return the last fatal error by PCI address. GPUs whose driver was unbound since then are left out.

    Raises ObservationError if the record cannot be read: a failed GPU must not count as healthy.
    """
    return {address: GpuFault(each.reason, each.meaning, each.since) for address, each in _recorded(system).items()}


def record_fault(system: System, address: str, fault: GpuFault) -> bool:
    """Record a fatal error, unless it is recorded already or the GPU has no driver.

    Return whether the record changed. Raises OSError, or AgentError if another process keeps the lock or the record
    cannot be read.
    """
    with _lock(system):
        bound, recorded = binding(system, address), _recorded(system)
        # If only the meaning of the error is new, record the error again: where a reset was enough before, a reboot may
        # be needed now.
        known = recorded.get(address)
        if bound is None or (known and (known.reason, known.meaning) == (fault.reason, fault.meaning)):
            return False
        new = _Fault(fault.reason, fault.meaning, fault.since, bound)
        _RECORD.write(GPU_FAULTS, {**recorded, address: new}, system)
        return True


def forget_fault(system: System, address: str) -> bool:
    """Remove a GPU from the record, and return whether it was there. Raises what `record_fault` raises."""
    with _lock(system):
        recorded = _recorded(system)
        if address not in recorded:
            return False
        _RECORD.write(GPU_FAULTS, {each: fault for each, fault in recorded.items() if each != address}, system)
        return True


def _lock(system: System) -> AbstractContextManager[None]:
    return locked(system, GPU_FAULTS_LOCK, LOCK_WAIT, "the record of GPUs' fatal errors is in use")


def _recorded(system: System) -> dict[str, _Fault]:
    # A damaged record counts as empty: otherwise no pass would be possible as long as the damaged file exists.
    found = _RECORD.read_known(GPU_FAULTS, system) or {}
    return {address: each for address, each in found.items() if binding(system, address) == each.binding}
