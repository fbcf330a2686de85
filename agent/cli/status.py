"""`unbounded-agent status`: prints the conditions of each machine."""

from agent.cli.output import print_machines, report_problems
from agent.cli.printing import say
from agent.host.reconcile import Reconciler
from agent.host.state.condition_history import as_json


def status(reconciler: Reconciler, *, for_programs: bool) -> int:
    """Print the conditions as tables, or as JSON for programs. Return the exit code."""
    facts, planned, difference = reconciler.preview()
    machines = reconciler.evaluate(facts, planned, difference)
    report_problems(facts)
    if for_programs:
        say([as_json({machine.name: machine.conditions for machine in machines})])
    else:
        print_machines(machines, reconciler)
    return 0
