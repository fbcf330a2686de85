"""Marks the machines that have started, or that a command has stopped, since the host booted.

The marks are needed because systemd forgets the start of a unit when it unloads the unit, and does not record the stop
of a unit that did not run.
"""

from collections.abc import Iterable
from contextlib import suppress

from agent.model.facts import MachineFacts
from agent.model.paths import start_began_mark
from agent.system.files import System


def mark_start(machine: str, system: System) -> None:
    """Mark a machine whose start has begun, or that is about to be stopped.

    Ignores failures: if the machine runs, the next pass marks it.
    """
    # The mark is a directory, because one call makes it. A file would be written by way of a temporary file.
    with suppress(OSError):
        system.make_directory(start_began_mark(machine))


def mark_starts(machines: Iterable[MachineFacts], system: System) -> None:
    """Mark those machines that run. A machine may have started before the agent was installed."""
    for machine in machines:
        if isinstance(machine.unit_state, str) and not machine.ended:
            mark_start(machine.name, system)


def has_started(machine: str, system: System) -> bool:
    """Return whether the machine is marked."""
    return system.is_directory(start_began_mark(machine))
