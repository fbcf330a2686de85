"""The host that a command works on, and the configuration that it works with."""

import argparse
import os

from agent.cli.parser import DIAGNOSES, LAST_GOOD, OPTIONAL, SAVES, find_command
from agent.cli.printing import progress
from agent.config.load import Loaded, last_good_identity, load_config, load_or_last_good
from agent.config.settings import Config
from agent.model.errors import AgentError, ConfigError, NoMachinesError
from agent.model.paths import CONFIG_FILE
from agent.system.bus import SystemBus
from agent.system.files import System
from agent.system.process import Runner, host_runner


def this_host(tool_runner: Runner | None = None) -> System:
    """Return the host that this process runs on. Commands that download need a `tool_runner` (System.run_tool)."""
    return System(host_runner, bus=SystemBus(), tool_runner=tool_runner)


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
    standard, use = options.config == CONFIG_FILE, command.configuration
    if use == LAST_GOOD and standard:
        loaded = load_or_last_good(system)
        if loaded.rejected and name != "run":
            progress(f"the configuration is invalid, using the last good one: {loaded.rejected}")
        return loaded
    before = last_good_identity(system)
    try:
        config = load_config(system, options.config, save=use == SAVES)
    except NoMachinesError as error:
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
