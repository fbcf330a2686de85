"""Keeps what is known of single GPUs until they leave the PCI bus: detached, lost, failed, or tested.

One file in /run has it all, so that a reboot of the host clears it: by then, other devices may be plugged in. To keep a
GPU from machines permanently, use the configuration. The kernel log shows only the event of a loss or an error: without
the record, the service would not know of it after a restart.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from agent.host.state.locks import locked
from agent.host.state.records import Digested, Record, Time, first_intact
from agent.model.errors import AgentError
from agent.model.facts import (
    GPU_TEST,
    Absent,
    Begun,
    Broken,
    GpuFault,
    GpuTest,
    Granted,
    Remembered,
    Seen,
    Taint,
    Unseen,
    Verdict,
)
from agent.model.paths import GPU_RESETS, GPUS, GPUS_LOCK, PCI_DEVICES, REMEMBERED_GPUS
from agent.system.files import System
from agent.system.trust import count, discard

LOCK_WAIT = 5.0
"""Seconds to wait for another writer, which needs milliseconds."""
NORMAL = 600.0
"""Seconds without another error after which a degraded GPU counts as healthy again, and at most REPEATED more."""
REPEATED = 60.0
"""Seconds between two writes of the record because errors that are no worse came again. `last` is so much too old."""


class Resetting(Struct, frozen=True, omit_defaults=True):
    """How far `gpus reset` has got with a GPU. The command goes on from there if it was killed."""

    restore: bool | None = None
    """Whether the driver must keep the GPU initialised again afterwards, as it did before; None if not yet observed."""
    done: float = 0.0
    """When the GPU was reset, and answered; 0 if it was not yet."""


class GpuNote(Struct, frozen=True, omit_defaults=True):
    """What is recorded of one GPU."""

    device: int
    """What `_device` returned: a device that is plugged in later at this address has nothing to do with the note."""
    binding: int | None = None
    """What `binding` returned when `lost`, `fault`, `found` or `attached` was recorded; None if the GPU had no driver.
    All count until that changes."""
    lost: str = ""
    """What the kernel log said about the loss."""
    fault: GpuFault | None = None
    """The worst error in the kernel log, or that the GPU itself has named; of equally bad ones, the first."""
    found: GpuFault | None = None
    """The worst error that a test has found. What ends the other one does not end this one."""
    taint: Taint | None = None
    attached: float = 0.0
    """When an administrator last attached the GPU, or a pass found its driver bound again. What the GPU said before
    does not count: its machine may repeat it."""
    resetting: Resetting | None = None
    """Set only if `taint` is."""
    test: GpuTest | None = None
    tested_binding: int | None = None
    """What `binding` returned when `test` was recorded."""
    begun: Begun | None = None

    @property
    def worst(self) -> GpuFault | None:
        """The worse of both errors; of equally bad ones, what a test has found, which is harder to end."""
        known = [each for each in (self.found, self.fault) if each]
        if not known:
            return None
        worst = max(known, key=lambda each: each.verdict.severity)
        return replace(worst, last=max(each.last for each in known), own_word=any(each.own_word for each in known))


class GpuNotes(Struct, frozen=True):
    """What is recorded, by PCI address."""

    notes: Mapping[str, GpuNote] = field(default_factory=dict)
    problem: str = ""
    """Why the record was discarded; empty if it was not."""
    outdated: bool = False
    """Whether the record still has what no longer counts (`record_current`)."""

    @property
    def tainted(self) -> Mapping[str, Taint]:
        """All GPUs that no new pod may get, detached or not."""
        return {address: note.taint for address, note in self.notes.items() if note.taint}

    @property
    def detached(self) -> frozenset[str]:
        return frozenset(address for address, taint in self.tainted.items() if taint.detached)

    @property
    def draining(self) -> frozenset[str]:
        return frozenset(address for address, taint in self.tainted.items() if taint.draining)

    @property
    def resetting(self) -> Mapping[str, Resetting]:
        return {address: note.resetting for address, note in self.notes.items() if note.resetting}

    @property
    def lost(self) -> Mapping[str, str]:
        return {address: note.lost for address, note in self.notes.items() if note.lost}

    @property
    def attached(self) -> Mapping[str, float]:
        return {address: note.attached for address, note in self.notes.items() if note.attached}

    @property
    def tests(self) -> Mapping[str, GpuTest]:
        return {address: note.test for address, note in self.notes.items() if note.test}

    @property
    def begun(self) -> Mapping[str, Begun]:
        return {address: note.begun for address, note in self.notes.items() if note.begun}

    @property
    def faults(self) -> Mapping[str, GpuFault]:
        return {address: worst for address, note in self.notes.items() if (worst := note.worst)}


# The file is world-readable, because `plan` and `status` work as any user.
_RECORD = Record(dict[str, GpuNote])


def observe_gpus(system: System) -> GpuNotes:
    """Return the record. A damaged record is discarded: then it is empty, and `problem` says why.

    Raises AgentError if the record cannot be read now: a detached GPU must not be granted, and a failed one must
    not count as healthy.
    """
    found = _RECORD.read_seen(GPUS, system)
    if isinstance(found, Broken):
        count(GPUS, system)
        advice = "run `unbounded-agent gpus detach` again for each detached GPU, and look in `dmesg` for failed ones"
        return GpuNotes(problem=f"{found.why}; discarding the record of GPUs: {advice}")
    try:
        notes = _current(found, system)
        return GpuNotes(notes, outdated=isinstance(found, dict) and notes != found)
    except OSError as error:
        raise AgentError(f"{GPUS}: {error.strerror or error}") from error


# Each of these functions changes the note of a GPU that exists. They raise OSError, or an AgentError.


def record_detached(system: System, address: str, *, draining: bool) -> bool:
    """Record the GPU as detached. Return whether it exists. The caller must hold the pass lock.

    If the GPU is tainted already, since when and whether pods are evicted stay.
    """

    def detached(note: GpuNote) -> GpuNote:
        taint = note.taint or Taint(False, time.time())
        return replace(note, taint=replace(taint, detached=True, draining=draining, testing=False))

    _change(system, address, detached)
    return _device(system, address) is not None


def record_tainted(system: System, address: str, *, evict: bool, reset: bool = False) -> bool:
    """Record that no new pod may get the GPU, although machines still have it. Otherwise like `record_detached`.

    With `reset`, its reset has begun with that.

    A GPU that is detached already stays detached, because somebody may pull it out at any time, and its `draining`
    stays, because processes may still use it.
    """

    def tainted(note: GpuNote) -> GpuNote:
        taint = replace(note.taint or Taint(evict, time.time()), evict=evict, testing=False)
        return replace(note, taint=taint, resetting=note.resetting or (Resetting() if reset else None))

    _change(system, address, tainted)
    return _device(system, address) is not None


def forget_detached(system: System, address: str, *, was_reset: bool = False) -> None:
    """Record that the GPU is no longer detached, tainted or being reset. The caller must hold the pass lock.

    If it `was_reset`, the service has no more to do for that. Otherwise, it remembers how often it has tried.
    """

    def forgotten(note: GpuNote) -> GpuNote:
        return replace(note, taint=None, resetting=None, begun=None if was_reset else note.begun)

    _change(system, address, forgotten)


def record_resetting(system: System, address: str, resetting: Resetting) -> None:
    """Record how far the reset of a tainted or detached GPU has got."""
    _change(system, address, lambda note: replace(note, resetting=resetting if note.taint else None))


def record_testing(system: System, address: str, *, testing: bool) -> bool:
    """Record that no new pod may get the GPU while it is tested, or that the test is over.

    A taint that somebody else made stays as it is. Return whether the GPU exists. The caller must hold the pass lock.
    """

    def changed(note: GpuNote) -> GpuNote:
        if note.taint and not note.taint.testing:
            return note
        return replace(note, taint=Taint(False, time.time(), testing=True) if testing else None)

    _change(system, address, changed)
    return _device(system, address) is not None


def record_test(
    system: System, address: str, result: str, ended: Collection[str], machine: str = "", driver: str = ""
) -> None:
    """Record the result of a test, and that it is over.

    It ends an error that a test found, if that has one of the reasons `ended`.
    """
    test, bound = GpuTest(result, time.time(), machine, driver), binding(system, address)

    def tested(note: GpuNote) -> GpuNote:
        found = None if note.found and note.found.reason in ended else note.found
        taint = None if note.taint and note.taint.testing else note.taint
        # A reset that was killed goes on.
        begun = note.begun if note.resetting else None
        return replace(note, found=found, taint=taint, test=test, tested_binding=bound, begun=begun)

    _change(system, address, tested)


def forget_tests(system: System, machine: str) -> None:
    """Let no test count that this machine has made, because it is made again."""

    def outdated(note: GpuNote) -> GpuNote:
        of_it = note.test and note.test.machine == machine
        return replace(note, test=replace(note.test, outdated=True)) if note.test and of_it else note

    for address, test in observe_gpus(system).tests.items():
        if test.machine == machine:
            _change(system, address, outdated)


def record_begun(system: System, address: str, begun: Begun | None) -> None:
    """Record what the service begins by itself with the GPU, or that it has nothing more to do."""
    _change(system, address, lambda note: replace(note, begun=begun))


def record_stopped(system: System, address: str, why: str) -> None:
    """Record what stopped a reset or a test, if the service has begun it."""
    _change(system, address, lambda note: replace(note, begun=note.begun and replace(note.begun, why=why)))


def record_lost(system: System, address: str, why: str) -> bool:
    """Record a lost GPU, unless it has no driver: another condition reports that. Return whether the loss is new."""
    bound = binding(system, address)
    return bound is not None and _change(system, address, lambda note: replace(note, lost=why, binding=bound))


def record_fault(system: System, address: str, fault: GpuFault) -> bool:
    """Record an error, unless one that is at least as bad is recorded already. Return whether the record changed."""
    bound = binding(system, address)

    def failed(note: GpuNote) -> GpuNote:
        if fault.source == GPU_TEST:
            return replace(note, found=_worse(note.found, fault), binding=bound)
        done = note.resetting.done if note.resetting else 0.0
        # A reset has ended what came before it.
        before = None if note.fault and note.fault.last <= done < fault.last else note.fault
        return replace(note, fault=_worse(before, fault), binding=bound)

    return _change(system, address, failed)


def _worse(before: GpuFault | None, fault: GpuFault) -> GpuFault:
    """Return what to record of two errors. Of equally bad ones, the one counts that is harder to end."""
    if before is None:
        return fault
    own_word = before.own_word or fault.own_word
    if (fault.verdict.severity, not fault.until_answer) > (before.verdict.severity, not before.until_answer):
        return replace(fault, own_word=own_word)
    # If only the meaning of the error is new, it counts: a reset may be enough now, in place of a reboot. But a lesser
    # line with the same reason does not give the GPU back to pods.
    stays = fault.verdict.fenced or not before.verdict.fenced
    if before.reason == fault.reason and before.meaning != fault.meaning and stays:
        since = before.since if before.verdict is fault.verdict else fault.since
        return replace(fault, since=since, own_word=own_word)
    again = fault.last - before.last >= REPEATED or own_word > before.own_word
    return replace(before, last=fault.last, own_word=own_word) if again else before


def record_recovered(system: System, address: str, said: float = math.inf) -> bool:
    """Forget an error that the GPU itself has withdrawn at the time `said`, or its driver, just now.

    Return whether the record changed. An error after which the GPU needed a reset or a reboot is forgotten, and by an
    answer of the GPU also any that counts only until then. Nothing else ends that a GPU is broken.
    """
    needed, bound, by_driver = (Verdict.NEEDS_RESET, Verdict.NEEDS_REBOOT), binding(system, address), said == math.inf

    def recovered(note: GpuNote) -> GpuNote:
        fault = note.fault
        if fault is None or fault.last + REPEATED >= said:
            return note
        if fault.verdict not in needed and (by_driver or not fault.until_answer):
            return note
        # What the GPU said before the driver's word does not count.
        return replace(note, fault=None, attached=time.time() if by_driver else note.attached, binding=bound)

    return _change(system, address, recovered)


def forget_fault(system: System, address: str, until: float | None = None) -> bool:
    """Forget the GPU's worst error, and what it has said of itself. Return whether there was an error.

    `until` is when the GPU was reset: what came later stays, and what a test found, until a test passes.
    """
    had_error, bound, end = False, binding(system, address), time.time() if until is None else until

    def forgotten(note: GpuNote) -> GpuNote:
        nonlocal had_error
        fault = note.fault if note.fault and note.fault.last > end else None
        found = note.found if note.found and (until is not None or note.found.last > end) else None
        had_error = note.worst is not None and not fault and not found
        test = note.test and replace(note.test, outdated=True)
        return replace(note, fault=fault, found=found, attached=end, binding=bound, test=test)

    _change(system, address, forgotten)
    return had_error


def record_current(system: System) -> None:
    """Record which GPUs' drivers were bound again, and forget what no longer counts."""
    with locked(system, GPUS_LOCK, LOCK_WAIT, "the record of GPUs is in use"):
        found = _RECORD.read_seen(GPUS, system)
        notes = _current(found, system)
        if isinstance(found, dict) and notes != found:
            _RECORD.write(GPUS, notes, system)


def _change(system: System, address: str, change: Callable[[GpuNote], GpuNote]) -> bool:
    # The service records errors also during a pass, so it needs another lock than the pass lock.
    with locked(system, GPUS_LOCK, LOCK_WAIT, "the record of GPUs is in use"):
        device, found = _device(system, address), _RECORD.read_seen(GPUS, system)
        if isinstance(found, Broken):
            discard(GPUS, found.why, system)
        notes = _current(found, system)
        if device is None:
            return False
        before = notes.get(address, GpuNote(device))
        after = change(before)
        if after != before or isinstance(found, Broken):
            _RECORD.write(GPUS, {**notes, address: after}, system)
        return after != before


def _current(found: Seen[dict[str, GpuNote]], system: System) -> dict[str, GpuNote]:
    """Return what still counts. A damaged record counts as empty: otherwise no pass would be possible while it exists.

    Raises OSError if one of the GPUs cannot be observed, or AgentError if the record could not be read.
    """
    if isinstance(found, Unseen):
        raise AgentError(found.why)
    current = {}
    for address, note in found.items() if isinstance(found, dict) else ():
        if _device(system, address) == note.device:
            counts = note.fault or note.found or note.lost or note.attached
            if counts and (bound := binding(system, address)) != note.binding:
                note = replace(note, binding=bound, lost="", fault=None, found=None, attached=time.time())
            if note.fault and _is_over(note.fault):
                note = replace(note, fault=None)
            if note.test and not note.test.outdated and binding(system, address) != note.tested_binding:
                note = replace(note, test=replace(note.test, outdated=True))
            if note != GpuNote(note.device, note.binding, tested_binding=note.tested_binding):
                current[address] = note
    return current


def _is_over(fault: GpuFault) -> bool:
    return fault.verdict is Verdict.DEGRADED and time.time() - fault.last > NORMAL + REPEATED


def _device(system: System, address: str) -> int | None:
    """Return the inode number of the device's sysfs link; None if there is no device at this address.

    If another device is plugged in at this address, or the same one again, its link has another inode number.

    kernfs assigns inode numbers in a cycle (fs/kernfs/dir.c, idr_alloc_cyclic), so a number is not used again soon.
    """
    return system.link_inode(f"{PCI_DEVICES}/{address}")


def binding(system: System, address: str) -> int | None:
    """Return the inode number of a device's sysfs link `driver`; None if no driver is bound to the device.

    Each time that a driver is bound to the device, the number changes, as that of `_device`.
    """
    return system.link_inode(f"{PCI_DEVICES}/{address}/driver")


def bindings(system: System, addresses: Iterable[str]) -> dict[str, int]:
    """Return the results of `binding` by PCI address, for devices that are bound to a driver."""
    found = {address: binding(system, address) for address in addresses}
    return {address: bound for address, bound in found.items() if bound is not None}


# The resets that the agent began by itself. They are on disk: no reboot may begin the count again.

_RESETS = Record(dict[str, tuple[Time, ...]], advice="remove it if the GPUs work: then they count as never reset")


def count_reset(system: System, address: str, attempts: int, hours: int) -> None:
    """Record that the GPU is reset now. Raises AgentError if `attempts` resets have begun within `hours`."""
    with locked(system, GPUS_LOCK, LOCK_WAIT, "the record of GPUs is in use"):
        resets = require_reset_left(system, address, attempts, hours)
        _RESETS.write(GPU_RESETS, {**resets, address: (*resets.get(address, ()), time.time())}, system)


def forget_reset(system: System, address: str) -> None:
    """Do not count the last reset of the GPU: the tool did not begin it."""
    with locked(system, GPUS_LOCK, LOCK_WAIT, "the record of GPUs is in use"):
        found = _RESETS.read_seen(GPU_RESETS, system)
        if isinstance(found, dict) and found.get(address):
            _RESETS.write(GPU_RESETS, {**found, address: found[address][:-1]}, system)


def require_reset_left(system: System, address: str, attempts: int, hours: int) -> Mapping[str, tuple[float, ...]]:
    """Return when GPUs were reset within `hours`. Raises AgentError if this one was as often as `attempts`.

    A time in the future counts: the clock was set back since.
    """
    found = _RESETS.read_seen(GPU_RESETS, system)
    if isinstance(found, Broken | Unseen):
        raise AgentError(found.why)
    since, resets = time.time() - hours * 3600, {} if isinstance(found, Absent) else found
    resets = {gpu: tuple(each for each in times if each > since) for gpu, times in resets.items()}
    if len(resets.get(address, ())) >= attempts:
        raise AgentError(
            f"its {attempts} automatic resets within {hours} h did not help",
            f"look at `dmesg`, then run `unbounded-agent gpus reset {address}`, or replace the GPU",
        )
    return resets


class LogPosition(Struct, frozen=True):
    """How far the kernel log was read, and to which drivers GPUs were bound at that time."""

    sequence: int
    """Sequence number of the last record that was read."""
    bindings: dict[str, int]
    """Results of `binding` by PCI address, for GPUs that are bound to a driver."""


LOG_POSITION = Record(LogPosition)
"""The format of the record KERNEL_LOG_READ."""
REMEMBERED = Digested(Remembered)
"""The format of both copies of the record of the GPUs that machines were last granted."""
GRANTED = Record(Granted, 1)
"""The format of the record of the last grant that was published to a machine."""


def observe_remembered(system: System) -> tuple[Seen[Remembered], str]:
    """Return the GPUs that machines were last granted, and what is wrong with the record's copies, if anything is.

    Without an intact copy, the record is Unseen if a copy could not be read, Broken if one is damaged, and empty if
    both are missing.
    """
    copies = [REMEMBERED.read_seen(path, system) for path in REMEMBERED_GPUS]
    for path, copy in zip(REMEMBERED_GPUS, copies, strict=True):
        if isinstance(copy, Broken):
            count(path, system)
    problems = "; ".join(each.why for each in copies if isinstance(each, Broken | Unseen))
    found = first_intact(copies)
    if isinstance(found, Remembered):
        return found, f"{problems}; the other copy of this record is used" if problems else ""
    return Remembered() if isinstance(found, Absent) else type(found)(problems), problems
