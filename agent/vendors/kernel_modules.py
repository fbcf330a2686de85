"""Who loads a vendor's kernel modules, where that is configured: those that come with the kernel load by themselves."""

from collections.abc import Callable, Set

from agent.facts import PciDevice, Seen
from agent.system.files import System
from agent.vendors.nvidia.kernel_modules import load

Loader = Callable[[System, Callable[[], Seen[tuple[PciDevice, ...]]], Set[str], Callable[[str], None]], None]
"""Takes how PCI devices are listed, the addresses of detached ones, and who hears what was done; raises AgentError."""

LOADERS: tuple[Loader, ...] = (load,)
