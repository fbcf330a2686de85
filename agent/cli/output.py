"""Prints what several commands show about machines and their host."""

import time
from collections.abc import Sequence

from agent.cli.printing import report, say
from agent.cli.summary import Style, summaries, table
from agent.cli.terminal import terminal
from agent.host.outcome import NO_MACHINES, MachineOutcome
from agent.host.reconcile import Reconciler
from agent.model.facts import Facts
from agent.model.paths import machine_unit
from agent.model.text import rfc3339


def style(*, whole: bool = True) -> Style:
    """Return the style for standard output. `whole` is as in Style."""
    return Style(*terminal(), whole)


def print_machines(machines: Sequence[MachineOutcome], reconciler: Reconciler) -> None:
    """Print for each machine whether it is ready, and what is wrong."""
    say(summaries(machines, time.time(), style()))
    print_no_machines(reconciler)


def print_tables(machines: Sequence[MachineOutcome], reconciler: Reconciler) -> None:
    """Print a table of all conditions for each machine."""
    for machine in machines:
        times = [rfc3339(each.last_transition) if each.last_transition else "-" for each in machine.conditions]
        say(table(machine, times))
    print_no_machines(reconciler)


def print_no_machines(reconciler: Reconciler) -> None:
    """If the configuration has no machine, print a line that explains the empty result."""
    if not reconciler.config.machines:
        say([NO_MACHINES])


def report_problems(facts: Facts) -> None:
    """Report what was refused, discarded or not understood."""
    for problem in facts.all_problems():
        report(f"note: {problem}")


def started_and_stopped(name: str) -> str:
    """Return the sentence about a machine that was started and no longer runs."""
    return f"machine {name} started and then stopped: see `journalctl -e -u {machine_unit(name)}`"
