"""`unbounded-agent run`: the service on this host."""

import argparse
from collections.abc import Callable

from agent.cli.host import load, this_host
from agent.cli.wiring import make_reconciler
from agent.config.load import Loaded
from agent.host.daemon import loop
from agent.host.reconcile import Reconciler


def run_service(options: argparse.Namespace) -> int:
    """Run the service until SIGTERM or SIGINT, and return the exit code."""
    system = this_host()

    def make(loaded: Loaded, progress: Callable[[str], None]) -> Reconciler:
        return make_reconciler(loaded, system, progress)

    return loop.run(lambda: load(options, system), make)
