"""Talks to systemd: sd_notify(3) datagrams, the watchdog's interval, passed sockets, priorities of journal lines."""

import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from typing import TextIO

from agent.model.text import one_line

PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
"""Levels of syslog(3), which precede a line as `<N>` (sd-daemon(3))."""
STATUS_LIMIT = 500
"""Characters of STATUS=, which `systemctl status` shows in one line."""


FIRST_PASSED = 3
"""The first file descriptor that systemd passes (SD_LISTEN_FDS_START)."""

log = logging.getLogger(__name__)


class Notifier:
    """Sends messages to the service manager. Without an address, it does nothing."""

    def __init__(self, address: str = "") -> None:
        """Set the address as in $NOTIFY_SOCKET: a path, or `@` and a name in the abstract namespace."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    def send(self, *assignments: str) -> None:
        """Send one datagram of `NAME=value` lines. Ignores errors."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
            s.settimeout(1.0)
            s.sendto("\n".join(assignments).encode(), self._address)

    def status(self, sentence: str) -> None:
        """Set the line that `systemctl status` shows."""
        self.send("STATUS=" + one_line(sentence)[:STATUS_LIMIT])


def watchdog_interval(environment: Mapping[str, str]) -> float:
    """Return the seconds within which systemd expects a sign of life (sd_watchdog_enabled(3)); 0 if it expects none."""
    microseconds, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(microseconds) / 1e6


def listeners(environment: Mapping[str, str]) -> tuple[socket.socket, ...]:
    """Return the listening stream sockets that systemd passed to this process (sd_listen_fds(3)).

    Other sockets that systemd passed are closed. Call this function only once, because each call would return objects
    for the same descriptors.
    """
    pid, count = environment.get("LISTEN_PID", ""), environment.get("LISTEN_FDS", "")
    if pid != str(os.getpid()) or not count.isdecimal():
        return ()
    sockets = []
    for descriptor in range(FIRST_PASSED, FIRST_PASSED + int(count)):
        try:
            passed = socket.socket(fileno=descriptor)
        except OSError:
            log.warning("file descriptor %d, which systemd passed, is not a socket", descriptor)
            continue
        if passed.type is socket.SOCK_STREAM and passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            passed.set_inheritable(False)
            passed.setblocking(True)
            sockets.append(passed)
        else:
            log.warning("the socket %d, which systemd passed, is not one that accepts connections", descriptor)
            passed.close()
    return tuple(sockets)


class PriorityFormatter(logging.Formatter):
    """Puts the priority before each line, because the journal treats each line as a separate message."""

    def format(self, record: logging.LogRecord) -> str:
        priority = PRIORITIES.get(record.levelno, 6)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def log_to(stream: TextIO) -> None:
    """Write the agent's log to `stream`. If `stream` is a terminal, leave out the priorities."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter() if stream.isatty() else PriorityFormatter())
    logger = logging.getLogger("agent")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
