"""Removes what earlier runs left: temporary files of killed writers, and a machine's old report."""

from collections.abc import Collection
from contextlib import suppress

from agent.model.paths import (
    AGES,
    CONDITIONS,
    DETACHED_GPUS,
    MACHINES_STATE,
    MANIFESTS,
    OWNED,
    RELOAD_PENDING,
    REMEMBERED_GPUS,
    REPORT_NAME,
    WAKE,
    conditions_file,
    granted_file,
    handed_roots_file,
    joined_file,
    live_file,
    machine_files,
    report_directory,
    rewritten_nspawn,
)
from agent.system.files import NEW, System

HOST_FILES = (AGES, CONDITIONS, DETACHED_GPUS, OWNED, RELOAD_PENDING, WAKE, *REMEMBERED_GPUS)
"""Files that are written only under the pass lock, which the caller of `clear_remains` holds. Other files, such as the
record of what the service read in the kernel log, are left out, because somebody may be writing them at this moment.
The next writer of such a file removes its leftovers."""


def machines_with_state(system: System) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the machines that the agent has files for, also those no longer configured, and failures in sentences."""
    try:
        return system.entries(MACHINES_STATE), ()
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        return (), (f"{MACHINES_STATE}: cannot remove outdated conditions for Nodes: {error.strerror}",)


def clear_remains(system: System, machines: Collection[str]) -> None:
    """Remove temporary files next to the agent's files. Ignores failures, because leftovers do no harm."""
    # The files are removed by name, because the agent never lists a directory in which a machine can write.
    for path in (*HOST_FILES, *(path for name in machines for path in _state_files(name))):
        with suppress(OSError):
            system.remove_temporary(path)
    # The shell in the machine's unit writes this file under the pass lock, or without the lock if it could not get the
    # lock within some seconds. This pass holds the lock, so the file is very probably a leftover.
    for name in machines:
        with suppress(OSError):
            system.remove(rewritten_nspawn(name))
    with suppress(OSError):
        for name in system.entries(MANIFESTS):
            if name.endswith(NEW):
                system.remove(f"{MANIFESTS}/{name}")


def clear_report(system: System, machine: str) -> None:
    """Before the machine starts, remove its old report, and the file that says that its kubelet has joined.

    Both files are from the machine's last run, or from an earlier machine of this name.
    """
    for path in (f"{report_directory(machine)}/{REPORT_NAME}", joined_file(machine)):
        with suppress(OSError):
            system.remove(path)


def _state_files(name: str) -> tuple[str, ...]:
    return (*machine_files(name), conditions_file(name), granted_file(name), handed_roots_file(name), live_file(name))
