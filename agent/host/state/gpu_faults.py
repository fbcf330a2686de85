"""Keeps in /run which GPUs had a fatal error in the kernel log.

A GPU counts as recovered once a driver is bound to it again, after it came back on the bus or the driver was reloaded.
If it was reset without either, `gpus attach` clears the record. A reboot of the host clears the record as well.
"""

from collections.abc import Mapping

from pydantic import BaseModel

from agent.host.state.lost_gpus import binding
from agent.host.state.record import Record
from agent.model.gpu_facts import GpuFault
from agent.model.paths import GPU_FAULTS
from agent.system.files import System


class _Fault(BaseModel, defer_build=True):
    reason: str
    meaning: str
    since: float
    binding: int


_RECORD = Record(dict[str, _Fault])


def observe_faults(system: System) -> Mapping[str, GpuFault]:
    """Return the last fatal error by PCI address. GPUs that were bound to a driver later are left out."""
    return {address: GpuFault(each.reason, each.meaning, each.since) for address, each in _recorded(system).items()}


def record_fault(system: System, address: str, fault: GpuFault) -> bool:
    """Record a fatal error, unless it is recorded already or the GPU has no driver.

    Return whether the record changed. Raises OSError.
    """
    bound, known = binding(system, address), _recorded(system)
    if bound is None or (address in known and known[address].reason == fault.reason):
        return False
    new = _Fault(reason=fault.reason, meaning=fault.meaning, since=fault.since, binding=bound)
    _RECORD.write(GPU_FAULTS, {**known, address: new}, system)
    return True


def forget_fault(system: System, address: str) -> bool:
    """Remove a GPU from the record, and return whether it was there. Raises OSError."""
    known = _recorded(system)
    if address not in known:
        return False
    _RECORD.write(GPU_FAULTS, {each: fault for each, fault in known.items() if each != address}, system)
    return True


def _recorded(system: System) -> dict[str, _Fault]:
    # A damaged record counts as empty, because the damage is no reason to keep every GPU from pods.
    found = _RECORD.read(GPU_FAULTS, system) or {}
    return {address: each for address, each in found.items() if binding(system, address) == each.binding}
