"""`unbounded-agent run`: the service on this host."""

import argparse
from collections.abc import Callable

from agent.cli import garbage
from agent.cli.answering import Answers
from agent.cli.host import load, this_host
from agent.cli.wiring import make_reconciler
from agent.config.load import Loaded, validated
from agent.host.daemon import loop
from agent.host.reconcile import Reconciler


def run(options: argparse.Namespace) -> int:
    """Run the service until SIGTERM or SIGINT, and return the exit code."""
    system = this_host()

    def make(loaded: Loaded, progress: Callable[[str], None]) -> Reconciler:
        return make_reconciler(loaded, system, progress)

    garbage.for_a_service()
    return loop.run(lambda: load(options, system), make, answer=Answers(lambda: validated(system)).page)
