"""Puts together the reconciler of a command."""

import argparse
from collections.abc import Callable

from agent.cli.host import load, this_host
from agent.cli.printing import progress
from agent.config.load import Loaded
from agent.host.observe.ages import Ages
from agent.host.observe.memory import Memory
from agent.host.reconcile import Reconciler
from agent.system.files import System
from agent.system.sysfs import Sysfs


def make_reconciler(loaded: Loaded, system: System, report: Callable[[str], None] = progress) -> Reconciler:
    """Return a reconciler of this host with this configuration."""
    return Reconciler(loaded.config, system, Sysfs(system), report, rejected=loaded.rejected)


def make_reconcilers(system: System) -> Callable[[Loaded, Callable[[str], None]], Reconciler]:
    """Return a function that makes the service's reconcilers, one for each configuration."""
    # Shared, because the first age of a file depends on the wall clock. The caches start again: what they say about
    # skipped lines may concern a driver root that the new configuration no longer names.
    ages = Ages()

    def make(loaded: Loaded, report: Callable[[str], None]) -> Reconciler:
        reconciler = make_reconciler(loaded, system, report)
        reconciler.memory = Memory(ages=ages)
        return reconciler

    return make


def reconciler_for(options: argparse.Namespace) -> Reconciler:
    """Return the reconciler for a command. Raises the same errors as agent.cli.host.load."""
    system = this_host()
    return make_reconciler(load(options, system), system)
