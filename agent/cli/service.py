"""`unbounded-agent run`: the service on this host."""

import argparse
from functools import partial

from agent.cli.doctor.host import diagnose_machines
from agent.cli.host import load, make_reconciler
from agent.config.load import Loaded
from agent.host import gpu_recovery, switching
from agent.host.daemon import loop
from agent.host.daemon.health import Fixes
from agent.host.reconcile import Outcome, Reconciler
from agent.system.files import System


def serve(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Run the service until SIGTERM or SIGINT, and return the exit code."""
    system = reconciler.system
    return loop.run(
        partial(load, options, system),
        lambda loaded, progress: make_reconciler(loaded, system, progress),
        fix=partial(fixes, system),
        begin=partial(begin, system),
    )


def begin(system: System, loaded: Loaded, outcome: Outcome) -> tuple[str, ...]:
    """Start the units that have something to do. Return what is stopped, and why, in sentences."""
    stopped = gpu_recovery.begin(loaded.config, system, outcome)
    switching.begin(loaded.config, system, outcome)
    return stopped


def fixes(system: System, loaded: Loaded, outcome: Outcome) -> Fixes:
    """Return the commands that `doctor` names for each machine's conditions."""
    diagnoses = diagnose_machines(outcome.machines, outcome.facts, loaded.config, system, as_root=True)
    return {
        diagnosis.machine: {kind: each.fix for each in diagnosis.findings for kind in each.conditions if each.fix}
        for diagnosis in diagnoses
    }
