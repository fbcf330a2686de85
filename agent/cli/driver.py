"""`unbounded-agent driver upgrade`: replaces the packages of the host's driver, and reloads its modules."""

import argparse
from functools import partial

from agent.cli.lifecycle import start_machine, stop_machine
from agent.cli.printing import confirm, say
from agent.host.allocation import recorded_node
from agent.host.driver_upgrade import plan_upgrade
from agent.host.reconcile import Reconciler


def upgrade(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print what an upgrade would do. Without --dry-run, ask, and do it. Return the exit code. Raises AgentError."""
    kubeconfig = options.kubeconfig
    stop = partial(stop_machine, reconciler=reconciler, kubeconfig=kubeconfig, drains=True)
    start = partial(start_machine, reconciler=reconciler, kubeconfig=kubeconfig)
    planned = plan_upgrade(options.to, reconciler, stop, start, dry_run=options.dry_run)
    if isinstance(planned, str):
        say([planned])
        return 0
    if kubeconfig:
        for name in planned.machines:
            recorded_node(name, reconciler.system, "drain it with kubectl, then leave out --kubeconfig")
    say(planned.sentences(next_boot=options.next_boot))
    if options.dry_run:
        return 0
    confirm("the driver is upgraded as shown above", options)
    ending = planned.run(next_boot=options.next_boot)
    say(ending.sentences)
    return 0 if ending.done else 1
