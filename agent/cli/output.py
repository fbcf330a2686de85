"""What several commands print about machines and their host."""

from collections.abc import Iterator, Sequence

from agent.cli.printing import report, say
from agent.host.outcome import NO_MACHINES, MachineOutcome
from agent.host.reconcile import Reconciler
from agent.model.conditions import Condition
from agent.model.facts import Facts
from agent.model.text import rfc3339


def print_machines(machines: Sequence[MachineOutcome], reconciler: Reconciler) -> None:
    """Print each machine with its GPUs and a table of its conditions."""
    for machine in machines:
        say(_table(machine))
    print_no_machines(reconciler)


def _table(machine: MachineOutcome) -> Iterator[str]:
    yield f"{machine.name}: {len(machine.gpus)} GPUs {' '.join(machine.gpus)}".rstrip()
    rows = [("CONDITION", "STATUS", "SINCE", "REASON", "MESSAGE")]
    rows += [_row(condition) for condition in machine.conditions]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, *rest in rows:
        cells = [cell.ljust(width) for cell, width in zip(rest[:3], widths[1:], strict=True)]
        yield "  ".join([name.rjust(widths[0]), *cells, rest[3]])


def _row(condition: Condition) -> tuple[str, str, str, str, str]:
    since = rfc3339(condition.last_transition)
    return (condition.type, condition.status, since, condition.reason, condition.message)


def print_no_machines(reconciler: Reconciler) -> None:
    """Print a line if the configuration has no machine, because nothing else would explain an empty result."""
    if not reconciler.config.machines:
        say([NO_MACHINES])


def report_problems(facts: Facts) -> None:
    """Report what is wrong with the host, or could not be observed."""
    for problem in facts.all_problems():
        report(f"note: {problem}")
