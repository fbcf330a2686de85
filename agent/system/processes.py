"""Finds running programs by their names in /proc."""

import contextlib

from agent.system.files import System
from agent.system.seen import entries_if_present

NAME_LIMIT = 15
"""Characters of a program's name that the kernel keeps (TASK_COMM_LEN)."""
ENDED = ("Z", "X")
"""States of processes that have ended but are still listed (proc_pid_stat(5))."""


def program_runs(system: System, name: str) -> bool:
    """Return whether a process of this PID namespace, or of one inside it, has the program's name.

    The result is False if /proc cannot be read. Reading the names of a thousand processes takes tens of milliseconds.
    Any process may give itself any name.
    """
    with contextlib.suppress(OSError):
        return any(
            _is(system, pid, name[:NAME_LIMIT]) for pid in entries_if_present(system, "/proc") if pid.isdecimal()
        )
    return False


def _is(system: System, pid: str, name: str) -> bool:
    try:
        if system.attribute(f"/proc/{pid}/comm").rstrip("\n") != name:
            return False
        # The state follows the name, which is in parentheses, and may itself have spaces and parentheses.
        return not system.attribute(f"/proc/{pid}/stat").rpartition(") ")[2].startswith(ENDED)
    except OSError:
        # The process has ended since /proc was listed.
        return False
