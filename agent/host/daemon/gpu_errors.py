"""Follows GPU errors, most of them in the kernel log: counts, logs and records them."""

import logging
import select
import time
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from agent.host.state.gpus import (
    LOG_POSITION,
    LogPosition,
    binding,
    bindings,
    record_fault,
    record_lost,
    record_recovered,
)
from agent.host.vendors import HOST_VENDORS
from agent.model.errors import AgentError
from agent.model.facts import KERNEL_LOG, GpuFault, Verdict
from agent.model.paths import KERNEL_LOG_READ, PCI_DEVICES
from agent.model.text import one_line, rfc3339
from agent.system.devices import PATH, KernelLog, open_kernel_log
from agent.system.files import System
from agent.system.journal_fields import GPU_ERROR_ID
from agent.system.trust import read_seen
from agent.vendors.host_vendor import GpuError

log = logging.getLogger(__name__)


class _Unrecorded(Struct):
    """What is known about the occurrence of an error that is not recorded yet."""

    binding: int | None
    """The GPU's binding (agent.host.state.gpus) when the error came; None without a driver, or if unknown."""
    since: float
    """When the error was read, in seconds since the epoch."""
    reported: bool = False
    """Whether it was logged that the error could not be recorded."""


class GpuErrors:
    """Follows the kernel log. It is an event source (agent.host.daemon.wakeups): a GPU's new verdict causes a pass."""

    name = "kernel-log"

    def __init__(
        self,
        system: System,
        counted: Callable[[str, int, int], None] = lambda address, number, times: None,
        open_log: Callable[[str, int | None], KernelLog] = open_kernel_log,
    ) -> None:
        """`counted` gets a GPU's address, an error's number, and how often that occurred; `open_log` a path and the
        number of the last log record that was read.
        """
        self.error = ""
        """Why the log cannot be read; empty if it can."""
        self.last: dict[str, str] = {}
        """The last error of each GPU, and when it was read, by PCI address."""
        self._system, self._counted, self._open = system, counted, open_log
        self._unrecorded: dict[GpuError, _Unrecorded] = {}
        """Errors that are not yet recorded in the host half's state, in the order in which each came last."""
        self._log: KernelLog | None = None
        self._position, self._unsaved = LOG_POSITION.read(KERNEL_LOG_READ, system), False
        """The position that was last saved, or was to be saved. If it could not be written, `_unsaved` is True."""
        self._sequence = self._position.sequence if self._position else None
        """Number of the last log record that was read. At the first start after a boot of the host, this is None until
        the records that exist are read. It is unknown to which drivers the GPUs were bound when they were written, so
        only those count that say why a GPU has no driver.
        """

    def open(self) -> None:
        """Open the log, unless it is open. Raises OSError."""
        if self._log is None:
            try:
                self._log = self._open(self._system.full_path(PATH), self._sequence)
            except OSError as error:
                raise self._failed(error) from error
            self.error = ""
            if self._sequence is None:
                # Most of the records that exist already do not count. So read now: in the first pass, the records that
                # are written until then would not count either.
                self._read()

    def close(self) -> None:
        """Close the log; the next `open` or `needs_pass` opens it again."""
        if self._log:
            self._log.close()
            self._log = None

    def polled(self) -> Mapping[int, int]:
        return {self._log.fileno(): select.POLLIN} if self._log else {}

    def needs_pass(self) -> bool:
        """Read new log records. Return whether an error changed the host half's state. Raises OSError.

        Errors that earlier reads could not record, for example on a full disk, are tried again: the kernel does not
        repeat them.
        """
        recorded = self._record()
        self._read()
        return self._record() or recorded

    def receive(self, error: GpuError) -> bool:
        """Record an error that the kernel has just reported in another way. Return whether that needs a pass."""
        self._handle(error, 1, behind=False)
        return self._record()

    def save_position(self, addresses: Iterable[str]) -> None:
        """Record how far the log was read, for the next start. `addresses` are the host's GPUs. Raises OSError."""
        if self._sequence is None or self._unrecorded:
            # Without a sequence number, there is no position to save. If there are unrecorded errors, keep the old
            # position, so that the next start of the service reads these errors again.
            return
        # Until all old records of the log are read, keep the bindings that were saved last: the current bindings may be
        # newer than the old records.
        keep = self._log is None or self._log.behind
        last = self._position.bindings if self._position else {}
        position = LogPosition(sequence=self._sequence, bindings=last if keep else bindings(self._system, addresses))
        if position != self._position or self._unsaved:
            self._position, self._unsaved = position, True
            LOG_POSITION.write(KERNEL_LOG_READ, position, self._system)
            self._unsaved = False

    def _failed(self, error: OSError) -> OSError:
        self.close()
        self.error = f"{PATH}: {error.strerror}"
        return OSError(self.error)

    def _read(self) -> None:
        self.open()
        if self._log is None:
            return
        overruns, behind, first = self._log.overruns, self._log.behind, self._sequence is None
        try:
            texts = self._log.read()
        except OSError as error:
            raise self._failed(error) from error
        # At the first start after a boot, `_sequence` stays None until all old records are read. Otherwise, after a
        # restart in between, the service would take the remaining old records for new ones.
        if self._sequence is not None or not self._log.behind:
            self._sequence = self._log.sequence
        if self._log.overruns > overruns:
            log.warning("%s: records were overwritten before they were read; GPU errors may have been missed", PATH)
        # If many log records have the same error, check and log the error once, at its last place: an error that comes
        # again after the GPU has recovered counts.
        found = (vendor.parse_kernel_message(text) for text in texts for vendor in HOST_VENDORS)
        counts = dict[GpuError, int]()
        for each in found:
            if each:
                counts[each] = counts.pop(each, 0) + 1
        for each, count in counts.items():
            if not first or self._explains(each):
                self._handle(each, count, behind)

    def _explains(self, error: GpuError) -> bool:
        """Return whether the error, though old, is why the GPU has no driver now."""
        return error.refused and read_seen(self._system.exists, f"{PCI_DEVICES}/{error.pci_address}/driver") is False

    def _handle(self, error: GpuError, count: int, behind: bool) -> None:
        """Count and log an error. If it says something of the GPU's health, note it for `_record`.

        If `behind`, the error may have come before the log was opened. After such an error, the GPU may have been bound
        to a driver again. So the error is recorded only if the binding is still the one that was saved with the
        position.
        """
        # Errors at an address where no GPU is, or had an earlier error, are ignored. This limits the number of series
        # of unbounded_agent_gpu_xid_errors_total, because a host has few slots.
        address = error.pci_address
        if address not in self.last and read_seen(self._system.exists, f"{PCI_DEVICES}/{address}") is not True:
            return
        if error.number is not None:
            self._counted(address, error.number, count)
        self.last[address] = f"{error.meaning} (read at {rfc3339(time.time())})"
        level = logging.INFO if error.from_application or error.recovered else logging.WARNING
        times = f" ({count} times)" if count > 1 else ""
        fields = {"MESSAGE_ID": GPU_ERROR_ID, "GPU": address, "ERROR": error.reason}
        log.log(level, "%s: %s%s", address, error.meaning, times, extra={"fields": fields})
        if not (error.lost or error.recovered or error.verdict is not Verdict.HEALTHY):
            return
        try:
            saved = self._position.bindings if self._position else {}
            if behind and error.vendor and saved.items() & bindings(self._system, saved).items():
                # Of an NVSwitch, no binding was saved. It is bound again together with all GPUs.
                behind = False
            bound = saved.get(address) if behind else binding(self._system, address)
            if self._explains(error):
                # It came after the GPU had lost its driver, however it was bound at the saved position.
                bound = None
        except OSError as problem:
            log.error("cannot record the fault of GPU %s: %s", address, one_line(str(problem)))
        else:
            self._unrecorded[error] = self._unrecorded.pop(error, _Unrecorded(bound, time.time()))

    def _record(self) -> bool:
        """Record the noted errors in the host half's state, and return whether this state changed.

        If a GPU's binding has changed since its error came, the error is dropped: it was another driver's, or the same
        driver has initialised the GPU again.
        """
        changed, failed = False, set()
        for error, then in tuple(self._unrecorded.items()):
            address = error.pci_address
            if address in failed:
                # An earlier error of this GPU could not be recorded, so do not record this error yet: the order counts
                # where a GPU recovers.
                continue
            try:
                if then.binding == binding(self._system, address):
                    if error.recovered:
                        changed |= record_recovered(self._system, address)
                    elif error.verdict is not Verdict.HEALTHY:
                        times = (then.since, error.verdict, then.since)
                        ends = (KERNEL_LOG, error.until_answer, error.vendor)
                        fault = GpuFault(error.reason, error.meaning, *times, *ends, own_word=error.own_word)
                        changed |= record_fault(self._system, address, fault)
                    changed |= error.lost and record_lost(self._system, address, error.meaning)
            except (OSError, AgentError) as problem:
                failed.add(address)
                if not then.reported:
                    reason = one_line(str(problem))
                    log.error("cannot record the fault of GPU %s; each pass tries again: %s", address, reason)
                then.reported = True
            else:
                del self._unrecorded[error]
        return changed
