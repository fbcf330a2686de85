"""Writes entries with fields to the journal, in its native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL)."""

import contextlib
import logging
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from typing import TextIO

from agent.model.device import PCI_ADDRESS

SOCKET = "/run/systemd/journal/socket"
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
"""Levels of syslog(3) by those of logging."""
COMMAND_ID = "0542b3a4fb974ab18be2da3f5c514909"
"""MESSAGE_ID of a command that changes the host."""
CONDITION_ID = "901b0175baeb4c4490abbd70464d1c48"
"""MESSAGE_ID of a condition of a machine that changed."""
GPU_ERROR_ID = "995189084a8a4532a1a3ca896ff6b6df"
"""MESSAGE_ID of a GPU's error in the kernel log."""
VERDICT_ID = "6237e7811e944cd3a63173e13ff1c9b2"
"""MESSAGE_ID of a GPU whose verdict changed, whoever said so: also a test, a reset or the GPU itself."""
Fields = Mapping[str, str]
"""A value has several words where the journal gets the field several times, once for each: GPU=."""


def write_entry(priority: int, message: str, fields: Fields, path: str = SOCKET) -> None:
    """Write one entry. Raises OSError if nobody listens, or if the entry is too long."""
    entry = {"PRIORITY": str(priority), "SYSLOG_IDENTIFIER": "unbounded-agent", **fields, "MESSAGE": message}
    # A value with a newline would need another form; so it could not begin a field of its own.
    gpus = "".join(f"GPU={each}\n" for each in entry.pop("GPU", "").split())
    lines = gpus + "".join(f"{name}={' '.join(value.splitlines())}\n" for name, value in entry.items())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        # Never wait for a journal that is stuck.
        sending.setblocking(False)
        sending.sendto(lines.encode(errors="backslashreplace"), path)


def record_command(words: Sequence[str], code: int, path: str = SOCKET, *, machine: str = "") -> None:
    """Write who ran a command that changes the host. The journal adds the process, its user and the login's user."""
    if os.geteuid():
        # Another user's command has changed nothing.
        return
    user = os.environ.get("SUDO_USER", "")
    by = f", by {user} with sudo" if user else ""
    fields = {"MESSAGE_ID": COMMAND_ID, "COMMAND": shlex.join(words), "EXIT_CODE": str(code)}
    fields |= {"GPU": " ".join(filter(PCI_ADDRESS.fullmatch, words))} | ({"MACHINE": machine} if machine else {})
    # Without a journal, as in a chroot, there is no record.
    with contextlib.suppress(OSError):
        write_entry(6, f"unbounded-agent {shlex.join(words)}: exit code {code}{by}", fields, path)


class JournalHandler(logging.StreamHandler[TextIO]):
    """Writes the agent's log: to the journal with fields, else to the stream, each line with its priority.

    `extra={"fields": {...}}` of a call of logging has the fields. The journal treats each line of the stream as an
    entry.
    """

    def __init__(self, stream: TextIO, path: str = SOCKET) -> None:
        super().__init__(stream)
        self._path = path if _is_journal(stream) else ""
        self._prefix = "" if stream.isatty() else "<{}>"

    def emit(self, record: logging.LogRecord) -> None:
        fields: Fields = getattr(record, "fields", {})
        if fields and self._path:
            try:
                write_entry(PRIORITIES.get(record.levelno, 6), record.getMessage(), fields, self._path)
            except OSError:
                pass
            else:
                return
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        prefix = self._prefix.format(PRIORITIES.get(record.levelno, 6))
        return "\n".join(f"{prefix}{line}" for line in super().format(record).splitlines())


def _is_journal(stream: TextIO) -> bool:
    """Return whether systemd connected the stream to the journal: $JOURNAL_STREAM in systemd.exec(5)."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
