"""Loads the drivers of the host's GPUs if `driver.load_modules` is set; run by unbounded-agent-modules.service."""

import argparse
from collections.abc import Callable

from agent.cli.host import load, this_host
from agent.cli.printing import progress
from agent.config.settings import Config
from agent.host.state.gpus import observe_gpus
from agent.host.vendors import LOADERS
from agent.system.devices import DeviceSource, Sysfs
from agent.system.files import System

KEY = "driver.load_modules"


def run_load_modules(options: argparse.Namespace) -> int:
    """Run `load-modules` with these options."""
    system = this_host()
    load_modules(load(options, system).config, system, Sysfs(system), progress)
    return 0


def load_modules(config: Config, system: System, devices: DeviceSource, report: Callable[[str], None]) -> None:
    """Load the kernel modules of the host's GPUs if `driver.load_modules` is set. Raises AgentError or OSError."""
    if not config.driver.load_modules:
        report(f"{KEY} is not set: loading kernel modules is left to the host")
        return
    detached = observe_gpus(system).detached
    for loader in LOADERS:
        loader(system, devices.pci_devices, detached, report)
