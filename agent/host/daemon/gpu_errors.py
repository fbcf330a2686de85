"""Follows GPU errors in the kernel log: counts and logs them, and records lost GPUs and fatal errors."""

import logging
import select
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from msgspec import Struct

from agent.host.state.gpus import LOG_POSITION, LogPosition, binding, bindings, record_fault, record_lost
from agent.host.vendors import HOST_VENDORS
from agent.model.errors import AgentError
from agent.model.facts import GpuFault
from agent.model.paths import KERNEL_LOG_READ, PCI_DEVICES
from agent.model.text import one_line, rfc3339
from agent.system.devices import PATH, KernelLog, open_kernel_log
from agent.system.files import System
from agent.system.trust import read_seen
from agent.vendors.host_vendor import GpuError

log = logging.getLogger(__name__)


Counted: TypeAlias = Callable[[str, int, int], None]
"""Called with a GPU's PCI address, an error's number, and how often it occurred."""


class _Unrecorded(Struct):
    """What is known about the occurrence of a fatal error that is not recorded yet."""

    binding: int | None
    """The GPU's binding (agent.host.state.gpus) when the error came; None without a driver, or if unknown."""
    since: float
    """When the error was read, in seconds since the epoch."""
    reported: bool = False
    """Whether it was logged that the error could not be recorded."""


class GpuErrors:
    """Follows the kernel log. It is an event source (agent.host.daemon.wakeups): a fatal error causes a pass."""

    name = "kernel-log"

    def __init__(
        self,
        system: System,
        counted: Counted = lambda address, number, times: None,
        open_log: Callable[[str, int | None], KernelLog] = open_kernel_log,
    ) -> None:
        """Begin to follow the log. `open_log` gets the log's path and the number of the last log record that was read.

        At the first start after a boot of the host, no log record has been read yet. In that case, existing log records
        are skipped, because it is unknown to which drivers the GPUs were bound when these were written.
        """
        self.counted = counted
        self.error = ""
        """Why the log cannot be read; empty if it can."""
        self.last: dict[str, str] = {}
        """The last error of each GPU, and when it was read, by PCI address."""
        self._system, self._open = system, open_log
        self._unrecorded: dict[GpuError, _Unrecorded] = {}
        """Fatal errors that are not yet recorded in the host half's state, the oldest first."""
        self._log: KernelLog | None = None
        self._last_saved, self._unsaved = LOG_POSITION.read(KERNEL_LOG_READ, system), False
        """The position that was last saved, or was to be saved. If it could not be written, `_unsaved` is True."""
        self._sequence = self._last_saved.sequence if self._last_saved else None
        """Number of the last log record that was read. At the first start after a boot, this is None until the old log
        records are skipped."""
        self._listen()

    def open(self) -> None:
        """Open the log, unless it is open. Raises OSError."""
        if self._log is None:
            self._listen()
        if self._log is None:
            raise OSError(self.error)

    def close(self) -> None:
        """Close the log; the next `open` or `read` opens it again."""
        if self._log:
            self._log.close()
            self._log = None

    def polled(self) -> Mapping[int, int]:
        return {self._log.fileno(): select.POLLIN} if self._log else {}

    def needs_pass(self) -> bool:
        """Do what `read` does, but raise OSError if the log cannot be read."""
        fatal = self.read()
        if self._log is None:
            raise OSError(self.error)
        return fatal

    def read(self) -> bool:
        """Read new log records. Return whether a fatal error was recorded in the host half's state.

        If the log cannot be read, `error` has the reason.

        Errors that earlier reads could not record, for example on a full disk, are tried again: the kernel does not
        repeat them.
        """
        self._read()
        return self._record()

    def _read(self) -> None:
        if self._log is None:
            self._listen()
        if self._log is None:
            return
        overruns, behind = self._log.overruns, self._log.behind
        try:
            texts = self._log.read()
        except OSError as error:
            self._close_after_error(f"{PATH}: {error.strerror}")
            return
        # At the first start after a boot, `_sequence` stays None until all old records are skipped. Otherwise, if a
        # restart interrupted the skipping, the service would read the remaining old records as new ones.
        if self._sequence is not None or not self._log.behind:
            self._sequence = self._log.sequence
        if self._log.overruns > overruns:
            log.warning("%s: records were overwritten before they were read; GPU errors may have been missed", PATH)
        # If many log records have the same error, check and log the error once.
        found = (vendor.parse_kernel_message(text) for text in texts for vendor in HOST_VENDORS)
        times = Counter(each for each in found if each)
        for each, count in times.items():
            if self._is_present(each.pci_address):
                self._handle(each, count, behind)

    def save_position(self, addresses: Iterable[str]) -> None:
        """Record how far the log was read, for the next start of the service. `addresses` are the host's GPUs."""
        if self._sequence is None or self._unrecorded:
            # Without a sequence number, there is no position to save. If there are unrecorded errors, keep the old
            # position, so that the next start of the service reads these errors again.
            return
        # Until all old records of the log are read, keep the bindings that were saved last: the current bindings may be
        # newer than the old records.
        keep = self._log is None or self._log.behind
        last = self._last_saved.bindings if self._last_saved else {}
        try:
            position = LogPosition(
                sequence=self._sequence, bindings=last if keep else bindings(self._system, addresses)
            )
            if position == self._last_saved and not self._unsaved:
                return
            self._last_saved = position
            LOG_POSITION.write(KERNEL_LOG_READ, position, self._system)
            self._unsaved = False
        except OSError as problem:
            if not self._unsaved:
                log.error(
                    "cannot save the read position of %s; each pass tries again: %s", PATH, one_line(str(problem))
                )
            self._unsaved = True

    def _handle(self, error: GpuError, count: int, behind: bool) -> None:
        """Count and log an error. If it is fatal, note it for `_record`.

        If `behind`, the error may have come before the log was opened. After such an error, the GPU may have been bound
        to a driver again. So the error is recorded only if the binding is still the one that was saved with the
        position.
        """
        address = error.pci_address
        self.counted(address, error.number, count)
        self.last[address] = f"{error.meaning} (read at {rfc3339(time.time())})"
        level = logging.INFO if error.from_application else logging.WARNING
        log.log(level, "%s: %s%s", address, error.meaning, f" ({count} times)" if count > 1 else "")
        saved = self._last_saved.bindings.get(address) if self._last_saved else None
        if not (error.lost or error.fault):
            return
        try:
            bound = saved if behind else binding(self._system, address)
        except OSError as problem:
            log.error("cannot record the fault of GPU %s: %s", address, one_line(str(problem)))
            return
        self._unrecorded.setdefault(error, _Unrecorded(bound, time.time()))

    def _record(self) -> bool:
        """Record the noted errors in the host half's state, and return whether this state changed.

        If a GPU's binding has changed since its error came, the error is dropped.
        """
        changed, failed = False, set()
        for error, then in tuple(self._unrecorded.items()):
            address = error.pci_address
            if address in failed:
                # An earlier error of this GPU could not be recorded, so do not record this error yet. The record has
                # only one error per GPU: when the earlier error is recorded, it would replace this one.
                continue
            try:
                if then.binding == binding(self._system, address):
                    fault = GpuFault(error.fault, error.meaning, then.since)
                    changed |= bool(error.fault) and record_fault(self._system, address, fault)
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

    def _is_present(self, address: str) -> bool:
        """Return whether the GPU is on the PCI bus, or was there when it had an earlier error.

        Errors at any other address are ignored. This limits the number of series of
        unbounded_agent_gpu_xid_errors_total, because a host has few slots.
        """
        return address in self.last or read_seen(self._system.exists, f"{PCI_DEVICES}/{address}") is True

    def _listen(self) -> None:
        try:
            self._log = self._open(self._system.root.rstrip("/") + PATH, self._sequence)
        except OSError as error:
            self._close_after_error(f"{PATH}: {error.strerror}")
        else:
            self.error = ""
            if self._sequence is None:
                # The first read skips the records that exist already. So read now: a first read in the first pass would
                # also skip the records that are written until then.
                self._read()

    def _close_after_error(self, why: str) -> None:
        self.close()
        if why != self.error:
            log.warning("cannot read the kernel log, so GPU errors go unnoticed; each pass tries again: %s", why)
        self.error = why
