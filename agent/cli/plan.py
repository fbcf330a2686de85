"""`unbounded-agent plan`: prints what a pass would do."""

from collections.abc import Iterator

from agent.cli.output import print_no_machines, report_problems
from agent.cli.printing import say
from agent.host.plan.diff import Difference
from agent.host.plan.goal import Plan
from agent.host.reconcile import Reconciler
from agent.model.facts import Unseen


def plan(reconciler: Reconciler) -> int:
    """Print the steps, and why some machines get none. Return 1 if a machine cannot get its settings."""
    facts, planned, difference = reconciler.preview()
    say(_exceptions(planned, difference))
    steps = [action.describe() for action in difference.actions]
    steps += [
        f"start machine {machine.name}"
        for machine in reconciler.evaluate(facts, planned, difference)
        if machine.stopped
    ]
    say([f"would {step}" for step in steps] or ["nothing to do"])
    print_no_machines(reconciler)
    report_problems(facts)
    return 0 if isinstance(facts.template_device_allow, tuple) and not difference.refused else 1


def _exceptions(planned: Plan, difference: Difference) -> Iterator[str]:
    """Yield a line for each machine whose settings are not written, with the reason."""
    for name, why in planned.skipped.items():
        yield f"{name}: {why}: nothing is set up"
    for name, why in planned.held.items():
        yield f"{name}: left unchanged: {why}"
    for name, refused in difference.refused.items():
        yield f"{name}: refused: {refused.why if isinstance(refused, Unseen) else refused}"
