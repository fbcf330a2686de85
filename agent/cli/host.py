"""The host that a command works on, and the configuration that it works with."""

import argparse
import os

from agent.cli.printing import progress
from agent.config.last_good import Loaded, keep, load_or_last_good
from agent.config.load import load_config
from agent.model.errors import UnsupportedError
from agent.model.paths import CONFIG_FILE
from agent.system.dbus import SystemBus
from agent.system.files import System
from agent.system.sh_runner import host_runner, tool_runner

READ_ONLY_COMMANDS = ("plan", "status", "doctor")
AT_START = ("run", "prepare", "load-modules")
"""Commands that units run. They use the last good configuration if the current one is invalid: otherwise a machine
would stay down or get no GPUs."""


def this_host() -> System:
    """Return the host that this process runs on."""
    return System(host_runner, bus=SystemBus(), tool_runner=tool_runner)


def load(options: argparse.Namespace, system: System) -> Loaded:
    """Return the configuration for a command. Raises ConfigError; UnsupportedError if root rights are missing."""
    if options.command not in READ_ONLY_COMMANDS and os.geteuid() != 0:
        raise UnsupportedError(
            "this command needs root rights", "run it with sudo; `plan`, `status` and `doctor` work as any user"
        )
    standard = options.config == CONFIG_FILE
    if options.command not in AT_START or not standard:
        config = load_config(system, options.config)
        if options.command in ("apply", "up") and standard:
            keep(config, system)
        return Loaded(config)
    loaded = load_or_last_good(system)
    if loaded.rejected and options.command != "run":
        progress(f"the configuration is invalid, using the last good one: {loaded.rejected}")
    return loaded
