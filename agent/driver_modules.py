"""What unbounded-agent-modules.service does: load the drivers of this host's GPUs, where that is configured."""

from collections.abc import Callable

from agent.config import Config
from agent.observe.detached import observe_detached
from agent.observe.udev import DeviceSource
from agent.system.files import System
from agent.vendors.kernel_modules import LOADERS

KEY = "driver.load_modules"


def load_modules(config: Config, system: System, devices: DeviceSource, tell: Callable[[str], None]) -> None:
    """Nothing where it is not configured. Raises AgentError or OSError."""
    if not config.driver.load_modules:
        tell(f"{KEY} is not set: kernel modules are left to the host")
        return
    detached = observe_detached(system).gpus
    for loader in LOADERS:
        loader(system, devices.pci_devices, detached, tell)
