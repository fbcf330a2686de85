"""Observes where GPUs are in the host: NUMA node and PCI root complex."""

import re
from collections.abc import Iterable, Mapping

from agent.config.settings import Config
from agent.model.facts import VendorFacts
from agent.model.gpu_facts import Placement
from agent.model.handoff import DRA
from agent.model.paths import PCI_DEVICES
from agent.system.files import System
from agent.system.seen import read_seen

ROOT = re.compile(r"/(pci[0-9a-f]{4,8}:[0-9a-f]{2})/")
"""A root complex in the path of a device in sysfs (pci_create_root_bus in the kernel)."""
NUMA_NODE = re.compile(r"-?[0-9]{1,4}")


def observe_placements(config: Config, vendors: Iterable[VendorFacts], system: System) -> Mapping[str, Placement]:
    """Return the placement of every GPU, by PCI address; none if no machine uses DRA, because only DRA needs them."""
    if not any(each.allocation == DRA for each in config.machines.values()):
        return {}
    return {gpu.pci_address: _placement(gpu.pci_address, system) for vendor in vendors for gpu in vendor.gpus}


def _placement(address: str, system: System) -> Placement:
    path = f"{PCI_DEVICES}/{address}"
    target, node = read_seen(system.read_link, path), read_seen(system.read_text, f"{path}/numa_node")
    # Take the first root complex in the path. Devices behind an Intel VMD controller have a second one below the first.
    root = ROOT.search(target) if isinstance(target, str) else None
    number = NUMA_NODE.fullmatch(node.strip()) if isinstance(node, str) else None
    return Placement(int(number[0]) if number else -1, root[1] if root else "")
