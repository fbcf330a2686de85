"""`unbounded-agent run`: the service on this host."""

import argparse
from collections.abc import Callable
from functools import partial

from agent.cli.doctor.host import diagnose_machines
from agent.cli.host import load, this_host
from agent.cli.wiring import make_reconciler
from agent.config.load import Loaded
from agent.config.settings import Config
from agent.host.daemon import loop
from agent.host.daemon.health import Fixes
from agent.host.reconcile import Outcome, Reconciler
from agent.system.files import System


def run_service(options: argparse.Namespace) -> int:
    """Run the service until SIGTERM or SIGINT, and return the exit code."""
    system = this_host()

    def make(loaded: Loaded, progress: Callable[[str], None]) -> Reconciler:
        return make_reconciler(loaded, system, progress)

    return loop.run(lambda: load(options, system), make, fix=partial(fixes, system))


def fixes(system: System, config: Config, outcome: Outcome) -> Fixes:
    """Return the commands that `doctor` names for each machine's conditions."""
    diagnoses = diagnose_machines(outcome.machines, outcome.facts, config, system, as_root=True)
    return {
        diagnosis.machine: {kind: each.fix for each in diagnosis.findings for kind in each.conditions if each.fix}
        for diagnosis in diagnoses
    }
