"""Removes temporary files that killed writers left next to our files."""

from contextlib import suppress

from agent.model.paths import (
    CONDITIONS,
    DETACHED_GPUS,
    KERNEL_LOG_READ,
    LOST_GPUS,
    MACHINES_STATE,
    MANIFESTS,
    OWNED,
    RELOAD_OWED,
    REPORT_NAME,
    WAKE,
    conditions_file,
    granted_file,
    handed_roots_file,
    live_file,
    machine_files,
    report_directory,
    rewritten_nspawn,
)
from agent.system.files import NEW, System

OF_HOST = (CONDITIONS, DETACHED_GPUS, KERNEL_LOG_READ, LOST_GPUS, OWNED, RELOAD_OWED, WAKE)


def clear_remains(system: System, configured: tuple[str, ...]) -> None:
    """Remove leftovers of files that not every pass writes. Ignores failures: leftovers do no harm."""
    # By name: the agent lists no directory that a machine can write.
    for path in (*OF_HOST, *(path for name in _machines(system, configured) for path in _of_machine(name))):
        with suppress(OSError):
            system.remove_remains(path)
    # The unit's shell holds the lock of passes while it writes this file, so one that exists now is a leftover.
    for name in _machines(system, configured):
        with suppress(OSError):
            system.remove(rewritten_nspawn(name))
    with suppress(OSError):
        for name in system.entries(MANIFESTS):
            if name.endswith(NEW):
                system.remove(f"{MANIFESTS}/{name}")


def clear_report(system: System, machine: str) -> None:
    """Remove the report of the machine's last run, or of an earlier machine of that name, before it starts."""
    with suppress(OSError):
        system.remove(f"{report_directory(machine)}/{REPORT_NAME}")


def _machines(system: System, configured: tuple[str, ...]) -> set[str]:
    """Return the machines' names, including machines that are no longer configured."""
    try:
        return {*configured, *system.entries(MACHINES_STATE)}
    except OSError:
        return {*configured}


def _of_machine(name: str) -> tuple[str, ...]:
    return (*machine_files(name), conditions_file(name), granted_file(name), handed_roots_file(name), live_file(name))
