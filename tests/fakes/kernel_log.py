"""A simulated /dev/kmsg."""

import os
import socket

from agent.system.devices import KernelLog


class Log:
    """Each datagram is one record, like each read(2) of the real one."""

    def __init__(self) -> None:
        self.ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._theirs.setblocking(False)
        self.opened = self._written = 0
        self.failing: list[int] = []
        """errno values that the next reads raise."""
        self._flood: list[bytes] = []

    def write(self, text: str, priority: int = 3) -> None:
        self._written += 1
        self.ours.send(f"{priority},{self._written},5140900,-;{text}\n SUBSYSTEM=pci\n".encode())

    def flood(self, records: int, text: str = "usb 1-1: new device", priority: int = 6) -> None:
        """Write more records than a socket holds, before all that is written later."""
        for _ in range(records):
            self._written += 1
            self._flood.append(f"{priority},{self._written},5140900,-;{text}\n".encode())

    def open(self, path: str, after: int | None) -> KernelLog:
        self.opened += 1
        return KernelLog(os.dup(self._theirs.fileno()), self._read, after)

    def _read(self, descriptor: int, limit: int) -> bytes:
        if self.failing:
            raise OSError(self.failing.pop(0), "simulated")
        if self._flood:
            return self._flood.pop(0)
        return os.read(descriptor, limit)

    def close(self) -> None:
        self.ours.close()
        self._theirs.close()
