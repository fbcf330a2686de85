"""What a failed test leaves behind of its bed: what the agent said, on the host and in the machine."""

from integration.bed.machine.node import MACHINE
from integration.bed.vm.guest import Guest, GuestError

LINES = "60"
COMMANDS = {
    "agent's status": ("unbounded-agent", "status"),
    "host's journal": ("journalctl", "--no-pager", "-o", "short-precise", "-n", LINES, "-u", "unbounded-agent"),
    "machine's journal": (
        "journalctl", "--no-pager", "-o", "short-precise", "-n", LINES, "-u", "unbounded-agent-gpu", "-M", MACHINE,
    ),
}  # fmt: skip
"""By title. The machine's journal is read on the host, for which nothing of the machine has to answer."""


def evidence(guest: Guest) -> list[tuple[str, str]]:
    """Titles and texts; a command that cannot run says why instead."""
    return [(title, _said(guest, argv)) for title, argv in COMMANDS.items()]


def _said(guest: Guest, argv: tuple[str, ...]) -> str:
    try:
        completed = guest.run(argv, timeout=30, check=False)
    except (GuestError, OSError) as error:
        return str(error)
    return completed.stdout + completed.stderr
