"""What several commands print about machines and their host."""

import os
import sys
import time
from collections.abc import Sequence

from agent.cli.printing import report, say
from agent.cli.summary import WIDTH, Style, summaries, table
from agent.host.outcome import NO_MACHINES, MachineOutcome
from agent.host.reconcile import Reconciler
from agent.model.facts import Facts
from agent.model.text import rfc3339

NARROWEST, WIDEST = 60, 120
"""Columns: text in longer lines is hard to read."""


def style(*, whole: bool = True) -> Style:
    """Return how to print to standard output. Only a terminal gets colours, unless NO_COLOR is set (no-color.org)."""
    if not sys.stdout.isatty():
        return Style(WIDTH, False, whole)
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns or WIDTH
    except OSError:
        columns = WIDTH
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Style(min(max(columns, NARROWEST), WIDEST), colour, whole)


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
    """Print a line if the configuration has no machine, because nothing else would explain an empty result."""
    if not reconciler.config.machines:
        say([NO_MACHINES])


def report_problems(facts: Facts) -> None:
    """Report what is wrong with the host, or could not be observed."""
    for problem in facts.all_problems():
        report(f"note: {problem}")
