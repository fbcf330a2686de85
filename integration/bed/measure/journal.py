"""Reads the messages of a unit."""

from collections.abc import Callable

from integration.bed.vm.guest import Completed


def messages(run: Callable[..., Completed], unit: str) -> str:
    """Return the unit's messages since the boot, without times. `run` runs a command on the host or in the machine.

    First, journald writes what it has received. Meanwhile it may enlarge its file, which journalctl(1) at that moment
    takes for truncated, and ignores.
    """
    run("journalctl", "--sync")
    return run("journalctl", "--boot", "--output=cat", "--no-pager", f"--unit={unit}").stdout
