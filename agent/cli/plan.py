"""`unbounded-agent plan`: prints what `apply` would do."""

import argparse
import time
from collections.abc import Iterator

from agent.cli.differences import difference as file_difference
from agent.cli.documents import document
from agent.cli.output import print_no_machines, report_problems
from agent.cli.printing import say
from agent.cli.wiring import reconciler_for
from agent.config.settings import Config
from agent.host.plan.diff import Difference
from agent.host.plan.goal import Plan
from agent.host.reconcile import Reconciler
from agent.model.actions import Action
from agent.model.facts import Absent, Broken, Facts, Unseen


def run_plan(options: argparse.Namespace) -> int:
    """Run `plan` with these options."""
    return plan(reconciler_for(options), with_differences=options.diff, for_programs=options.json)


def plan(reconciler: Reconciler, *, with_differences: bool = False, for_programs: bool = False) -> int:
    """Print the steps. Also print each machine that does not get its settings, or perhaps does not, with the reason.

    Return 1 if a machine's files must not be written, or if systemd-nspawn@.service is missing or cannot be read; 2 if
    a machine does not exist and `up` does not make it: its name may be wrong.
    """
    facts, planned, difference = reconciler.preview()
    stopped = [each.name for each in reconciler.evaluate(facts, planned, difference) if each.stopped]
    exceptions = tuple(_exceptions(planned, difference, facts))
    if for_programs:
        _print_json(difference, stopped, exceptions, facts)
    else:
        say(f"{name}: {why}" for name, why in exceptions)
        if difference.actions or stopped or not any(isinstance(each.root, Absent) for each in facts.machines):
            say(_steps(difference.actions, stopped, reconciler, with_differences=with_differences))
        print_no_machines(reconciler)
        report_problems(facts)
    return _plan_code(reconciler.config, difference, facts)


def _plan_code(config: Config, difference: Difference, facts: Facts) -> int:
    configured = [each for each in facts.machines if each.name in config.machines]
    broken = any(isinstance(each.root, Broken) for each in configured)
    if broken or difference.refused or not isinstance(facts.template_device_allow, tuple):
        return 1
    missing = (each.name for each in configured if isinstance(each.root, Absent))
    return 0 if all(config.machines[name].node for name in missing) else 2


def _steps(
    actions: tuple[Action, ...], stopped: list[str], reconciler: Reconciler, *, with_differences: bool
) -> Iterator[str]:
    if not actions and not stopped:
        yield "nothing to do"
    for action in actions:
        yield f"would {action.describe()}"
        if with_differences:
            yield from file_difference(action, reconciler.system)
    for name in stopped:
        yield f"would start machine {name}"


def _exceptions(planned: Plan, difference: Difference, facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield each machine that does not get its settings, or perhaps does not, with the reason."""
    for machine in facts.machines:
        if isinstance(machine.root, Unseen):
            yield machine.name, f"whether it exists is unknown; this is the plan if it does: {machine.root.why}"
    for name, why in planned.skipped.items():
        yield name, f"{why}: nothing is set up"
    for name, why in planned.held.items():
        yield name, f"left unchanged: {why}"
    for name, refused in difference.refused.items():
        yield name, f"its settings are not written: {refused.why if isinstance(refused, Unseen) else refused}"


def _print_json(
    difference: Difference, stopped: list[str], exceptions: tuple[tuple[str, str], ...], facts: Facts
) -> None:
    steps = [{"kind": each.kind, "sentence": each.describe()} for each in difference.actions]
    steps += [{"kind": "start", "sentence": f"start machine {name}"} for name in stopped]
    others = [{"machine": name, "message": why} for name, why in exceptions]
    content = {"steps": steps, "exceptions": others, "problems": facts.all_problems()}
    say([document("plan", time.time(), content)])
