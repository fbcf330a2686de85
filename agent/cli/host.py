"""The host that a command works on, the configuration that it works with, and the reconciler made of both."""

import argparse
import os
from collections.abc import Callable

from agent.cli.parser import DIAGNOSES, LAST_GOOD, NEEDS_NONE, OPTIONAL, READS, REMOVES, SAVES, find_command
from agent.cli.printing import progress
from agent.config.load import InForce, Loaded, last_good_identity, load_config, load_or_last_good
from agent.config.settings import Config, MachineSettings
from agent.host.observe.host import Memory
from agent.host.reconcile import Reconciler
from agent.host.state.records import read_ages
from agent.model.errors import AgentError, ConfigError, NoMachinesError
from agent.model.paths import CONFIG_FILE
from agent.system.bus import SystemBus
from agent.system.devices import Sysfs
from agent.system.files import System
from agent.system.process import Runner, host_runner


def settings_of(machine: str, config: Config) -> MachineSettings:
    """Return the settings of a machine that an argument names. Raises ConfigError if it is not configured."""
    if settings := config.machines.get(machine):
        return settings
    hint = f"add a table [machines.{machine}], or name one of these: {', '.join(config.machines) or 'none yet'}"
    raise ConfigError(f"machine {machine} is not configured", hint)


def reconciler_for(options: argparse.Namespace, tool_runner: Runner | None) -> Reconciler:
    """Return the reconciler for a command; one that downloads needs a `tool_runner`. Raises the errors of `load`."""
    system = System(host_runner, bus=SystemBus(), tool_runner=tool_runner)
    return make_reconciler(load(options, system), system)


def load(options: argparse.Namespace, system: System) -> Loaded:
    """Return the configuration for a command.

    Raises ConfigError, or AgentError if only root may run the command, and this process does not run as root.
    """
    name, command = find_command(options)
    if command.root and os.geteuid() != 0:
        raise AgentError(
            "this command needs root rights",
            "run it with sudo; `plan`, `status`, `doctor` and `gpus list` work as any user",
        )
    # With --dry-run, a command changes nothing, so it does not save the configuration either.
    use = READS if getattr(options, "dry_run", False) else command.configuration
    standard = options.config == CONFIG_FILE
    if use == NEEDS_NONE:
        return Loaded(Config(machines={}), in_force=False)
    if use == LAST_GOOD and standard:
        loaded = load_or_last_good(system)
        if loaded.rejected and name != "run":
            progress(f"the configuration is invalid, using the last good one: {loaded.rejected}")
        return loaded
    before = last_good_identity(system)
    try:
        config = load_config(system, options.config, save=use in (SAVES, REMOVES))
    except NoMachinesError as error:
        if use == REMOVES:
            return Loaded(Config(machines={}), in_force=False)
        if use not in (OPTIONAL, DIAGNOSES) or not standard:
            raise
        progress(str(error))
        config = Config(machines={})
    except ConfigError:
        if use != DIAGNOSES or not standard:
            raise
        # A user who looks for a fault with `doctor` must not have to correct the configuration first.
        return load_or_last_good(system)
    return Loaded(config, in_force=standard, before=before)


def make_reconciler(loaded: Loaded, system: System, report: Callable[[str], None] = progress) -> Reconciler:
    """Return a reconciler of this host with this configuration."""
    memory = Memory(ages=read_ages(system))
    reconciler = Reconciler(loaded.config, system, Sysfs(system), report, rejected=loaded.rejected, memory=memory)
    if loaded.in_force:
        reconciler.in_force = InForce(loaded.config, system, loaded.before)
    # Units and users may name a candidate.
    reconciler.look_for_candidates()
    return reconciler
