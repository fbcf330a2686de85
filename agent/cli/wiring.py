"""Puts together the reconciler of a command."""

import argparse
from collections.abc import Callable

from agent.cli.host import load, this_host
from agent.cli.printing import progress
from agent.config.load import InForce, Loaded
from agent.host.observe.host import Memory
from agent.host.reconcile import Reconciler
from agent.host.state.records import read_ages
from agent.system.devices import Sysfs
from agent.system.files import System
from agent.system.process import Runner


def make_reconciler(loaded: Loaded, system: System, report: Callable[[str], None] = progress) -> Reconciler:
    """Return a reconciler of this host with this configuration."""
    memory = Memory(ages=read_ages(system))
    reconciler = Reconciler(loaded.config, system, Sysfs(system), report, rejected=loaded.rejected, memory=memory)
    if loaded.in_force:
        reconciler.in_force = InForce(loaded.config, system, loaded.before)
    return reconciler


def reconciler_for(options: argparse.Namespace, tool_runner: Runner | None = None) -> Reconciler:
    """Return the reconciler for a command. `tool_runner` is as in this_host. Raises the same errors as `load`."""
    system = this_host(tool_runner)
    return make_reconciler(load(options, system), system)
