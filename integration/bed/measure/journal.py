"""Reads the messages of a unit."""

from collections.abc import Callable

from integration.bed.vm.guest import Completed


def messages(run: Callable[..., Completed], unit: str) -> str:
    """Return the unit's messages since the boot, without times. `run` runs a command on the host or in the machine.

    First, `--sync` makes journald write all messages that it has received. While journald enlarges a file,
    journalctl(1) takes the file for truncated, and ignores it.
    """
    run("journalctl", "--sync")
    return run("journalctl", "--boot", "--output=cat", "--no-pager", f"--unit={unit}").stdout
