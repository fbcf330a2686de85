"""GPU errors in the kernel's log, as the daemon follows them: counted, told, and kept where a GPU is lost."""

import logging
import select
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from agent.facts import GpuError
from agent.handoff import one_line
from agent.judgement import rfc3339
from agent.observe.lost_gpus import LogRead, binding, bindings, keep_log_read, log_read, record_lost
from agent.system.files import System
from agent.system.kernel_log import PATH, KernelLog, open_kernel_log
from agent.vendors.host import HOST_VENDORS

log = logging.getLogger("agent.gpu_errors")


Counted: TypeAlias = Callable[[str, int, int], None]
"""Hears PCI address, number of the error, and how often it came."""


class GpuErrors:
    """Also a source of wake-ups (agent.wakeups.Source): a lost GPU asks for a pass."""

    name = "kernel-log"

    def __init__(
        self,
        system: System,
        counted: Counted = lambda address, number, times: None,
        open_log: Callable[[str, int | None], KernelLog] = open_kernel_log,
    ) -> None:
        """`open_log` gets the log's path, and the number of the last record that is known.

        The first in a boot of the host knows none: it passes over what is there, of bindings that nobody kept.
        """
        self.counted = counted
        self.why_not = ""
        """What keeps the log from being read; empty while it is."""
        self.last: dict[str, str] = {}
        """The latest error of each GPU with its time, by PCI address."""
        self._system, self._open = system, open_log
        self._log: KernelLog | None = None
        self._kept = log_read(system)
        self._sequence = self._kept.sequence if self._kept else None
        self._listen()

    def open(self) -> None:
        """Follow the log from now on, if it is not followed yet. Raises OSError."""
        if self._log is None:
            self._listen()
        if self._log is None:
            raise OSError(self.why_not)

    def close(self) -> None:
        """The next `open` or `read` opens it again."""
        if self._log:
            self._log.close()
            self._log = None

    def polled(self) -> Mapping[int, int]:
        return {self._log.fileno(): select.POLLIN} if self._log else {}

    def asks(self) -> bool:
        """As `read`, but raises OSError once the log cannot be read any more."""
        lost = self.read()
        if self._log is None:
            raise OSError(self.why_not)
        return lost

    def read(self) -> bool:
        """Take what the kernel wrote since; whether a GPU was lost by it. Never raises for a log that fails."""
        if self._log is None:
            self._listen()
        if self._log is None:
            return False
        before, behind = self._log.overruns, self._log.behind
        try:
            texts, _ = self._log.read()
        except OSError as error:
            self._lose(f"{PATH}: {error.strerror}")
            return False
        if self._sequence is not None or not self._log.behind:
            # Else what is left to pass over would be told as new by whoever goes on from there.
            self._sequence = self._log.sequence
        if self._log.overruns > before:
            log.warning("%s: records were overwritten before they were read; errors of GPUs may be among them", PATH)
        # The same error again and again is one line and one look, however many records it has.
        times = Counter(errors(texts))
        taken = ((error, count) for error, count in times.items() if self._is_present(error.pci_address))
        return any([self._take(error, count, behind) for error, count in taken])

    def keep(self, addresses: Iterable[str]) -> None:
        """Note for the next start of the service how far the log is read; `addresses` are the host's GPUs."""
        if self._sequence is None:
            return
        if self._log is None or self._log.behind:
            # What is still to be read may be older than what the drivers are bound to by now.
            bound = self._kept.bindings if self._kept else {}
        else:
            bound = bindings(self._system, addresses)
        now = LogRead(sequence=self._sequence, bindings=bound)
        if now == self._kept:
            return
        self._kept = now
        try:
            keep_log_read(self._system, now)
        except OSError as problem:
            log.error("it cannot be kept how far %s was read: %s", PATH, one_line(str(problem)))

    def _take(self, error: GpuError, count: int, behind: bool) -> bool:
        """`behind`: it may be an old one, and the GPU's driver be bound anew since."""
        self.counted(error.pci_address, error.number, count)
        self.last[error.pci_address] = f"{error.meaning} (at {rfc3339(time.time())})"
        level = logging.INFO if error.of_application else logging.WARNING
        log.log(level, "%s: %s%s", error.pci_address, error.meaning, f" ({count} times)" if count > 1 else "")
        address = error.pci_address
        known = self._kept.bindings.get(address) if self._kept else None
        if not error.lost or (behind and known != binding(self._system, address)):
            return False
        try:
            return record_lost(self._system, error.pci_address, error.meaning)
        except OSError as problem:
            log.error("it cannot be kept that %s is lost: %s", error.pci_address, one_line(str(problem)))
            return False

    def _is_present(self, address: str) -> bool:
        """Also a GPU that has just left the bus, if it had errors before: series are bounded by the host's slots."""
        return address in self.last or self._system.exists(f"/sys/bus/pci/devices/{address}")

    def _listen(self) -> None:
        try:
            self._log = self._open(self._system.root.rstrip("/") + PATH, self._sequence)
        except OSError as error:
            self._lose(f"{PATH}: {error.strerror}")
        else:
            self.why_not = ""
            if self._sequence is None:
                # At once: what is passed over is what was written before.
                self.read()

    def _lose(self, why: str) -> None:
        self.close()
        if why != self.why_not:
            log.warning("errors of GPUs go unseen, which each pass tries again: %s", why)
        self.why_not = why


def errors(texts: Iterable[str]) -> Iterator[GpuError]:
    """Those that a vendor knows."""
    for text in texts:
        yield from (error for vendor in HOST_VENDORS if (error := vendor.kernel_message(text)))
