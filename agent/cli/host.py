"""The host that a command works on, and the configuration that it works with."""

import argparse
import os

from agent.cli.parser import COMMANDS, GPU_COMMANDS, KUBE_COMMANDS, UNIT_COMMANDS, full_name
from agent.cli.printing import progress
from agent.config.load import Loaded, last_good_identity, load_config, load_or_last_good
from agent.config.settings import Config
from agent.model.errors import ConfigError, NoMachinesError, UnsupportedError
from agent.model.paths import CONFIG_FILE
from agent.system.bus import SystemBus
from agent.system.files import System
from agent.system.process import Runner, host_runner

MAKES_PASSES = (
    *("apply", "up", "start", "restart", "reset"),
    *("gpus detach", "gpus attach", "kube allocation"),
)
"""Commands that make passes, in addition to UNIT_COMMANDS. Each of them reads the configuration, and saves it as the
last good one, which puts it in force. Otherwise, a process that still has an older configuration would undo what the
command does."""
WITHOUT_CONFIGURATION = ("doctor", "gpus list", "gpus holders")
"""Commands that work on a host without a configuration. None of them makes a pass: without a configuration, a pass
would remove the settings of all machines."""


def this_host(tool_runner: Runner | None = None) -> System:
    """Return the host that this process runs on. Commands that download need a `tool_runner` (System.run_tool)."""
    return System(host_runner, bus=SystemBus(), tool_runner=tool_runner)


def needs_root(options: argparse.Namespace) -> bool:
    """Return whether only root may run the command."""
    match full_name(options).split():
        case ["gpus", subcommand]:
            return GPU_COMMANDS[subcommand].root
        case ["kube", subcommand]:
            return KUBE_COMMANDS[subcommand].root
        case _:
            return COMMANDS[options.command].root


def load(options: argparse.Namespace, system: System) -> Loaded:
    """Return the configuration for a command.

    Raises ConfigError, or UnsupportedError if only root may run the command, and this process does not run as root.
    """
    if needs_root(options) and os.geteuid() != 0:
        raise UnsupportedError(
            "this command needs root rights",
            "run it with sudo; `plan`, `status`, `doctor` and `gpus list` work as any user",
        )
    standard = options.config == CONFIG_FILE
    # If the current configuration is invalid, the commands of units use the last good one: otherwise a machine would
    # not start, or would get no GPUs. All other commands fail, except `doctor`.
    if options.command not in UNIT_COMMANDS or not standard:
        before = last_good_identity(system)
        try:
            config = load_config(system, options.config, save=full_name(options) in MAKES_PASSES)
        except NoMachinesError as error:
            if full_name(options) not in WITHOUT_CONFIGURATION or not standard:
                raise
            progress(str(error))
            config = Config(machines={})
        except ConfigError:
            if options.command != "doctor" or not standard:
                raise
            # A user who looks for a fault with `doctor` must not have to correct the configuration first.
            return load_or_last_good(system)
        return Loaded(config, in_force=standard, before=before)
    loaded = load_or_last_good(system)
    if loaded.rejected and options.command != "run":
        progress(f"the configuration is invalid, using the last good one: {loaded.rejected}")
    return loaded
