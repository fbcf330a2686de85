"""Evidence for a failed test: the agent's output, on the host and in the machine."""

from integration.bed.machine.node import MACHINE
from integration.bed.vm.guest import Guest, GuestError

LINES = "60"
JOURNAL = ("journalctl", "--no-pager", "-o", "short-precise", "-n", LINES)
COMMANDS = {
    "agent's status": ("unbounded-agent", "status"),
    "host's journal": (*JOURNAL, "-u", "unbounded-agent"),
    "machine's journal": (*JOURNAL, "-u", "unbounded-agent-gpu", "-M", MACHINE),
    "containerd's journal": (*JOURNAL, "-u", "containerd", "-M", MACHINE),
}
"""Commands by title. The machine's journal is read on the host, so that nothing in the machine needs to answer."""


def evidence(guest: Guest) -> list[tuple[str, str]]:
    """Return titles and texts; if a command cannot run, its text says why."""
    return [(title, _output(guest, argv)) for title, argv in COMMANDS.items()]


def _output(guest: Guest, argv: tuple[str, ...]) -> str:
    try:
        completed = guest.run(argv, timeout=30, check=False)
    except (GuestError, OSError) as error:
        return str(error)
    return completed.stdout + completed.stderr
