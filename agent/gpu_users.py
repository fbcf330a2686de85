"""Which processes use a GPU, in words: `unbounded-agent gpus holders`."""

from collections.abc import Iterable, Iterator

from agent.errors import ConfigError, ObservationError
from agent.facts import DeviceNode, Facts, Gpu
from agent.holders import Held, Holder, find_holders
from agent.pci_address import as_in_sysfs
from agent.reconcile import Reconciler
from agent.system.files import System
from agent.vendors.host import host_vendor

UNSEEN_SHOWN = 10
"""Processes that could not be looked at; the others are counted."""


def holders(address: str, reconciler: Reconciler) -> tuple[str, ...]:
    """Who has the GPU open, a line each. Without an address: any GPU."""
    facts = reconciler.look()[0]
    gpus = [find_gpu(address, facts)] if address else [gpu for vendor in facts.vendors for gpu in vendor.gpus]
    lines: list[str] = []
    for gpu in gpus:
        nodes = gpu_nodes(facts, gpu.pci_address)
        held = look(reconciler.system, nodes)
        unknown = why_unknown(gpu, nodes)
        found = describe(held, gpu) if held or unknown else (nobody(held), *describe(held, gpu))
        lines += [f"{gpu.pci_address}: {line}" for line in (*found, unknown) if line]
    return tuple(lines)


def find_gpu(address: str, facts: Facts) -> Gpu:
    """Raises ConfigError where there is no such GPU, ObservationError where that cannot be told."""
    for vendor in facts.vendors:
        if not isinstance(vendor.devices, tuple):
            raise ObservationError(vendor.devices.why, "without the list of its nodes nobody can tell who uses a GPU")
    known = {gpu.pci_address: gpu for vendor in facts.vendors for gpu in vendor.gpus}
    found = known.get(as_in_sysfs(address))
    if found is None:
        raise ConfigError(f"{address!a}: there is no GPU of this PCI address", f"there are: {', '.join(sorted(known))}")
    return found


def gpu_nodes(facts: Facts, address: str) -> tuple[DeviceNode, ...]:
    """The GPU's own. MIG instances need no look of their own: their users have the whole GPU's node open too."""
    return tuple(_nodes(facts, address))


def _nodes(facts: Facts, address: str) -> Iterator[DeviceNode]:
    for vendor in facts.vendors:
        if isinstance(vendor.devices, tuple):
            yield from (node for node in vendor.devices if node.pci_address == address)


def why_unknown(gpu: Gpu, nodes: Iterable[DeviceNode]) -> str:
    """Why nobody can tell who uses it; empty where it can be told. Users are found by the node's number alone."""
    if not gpu.driver or any(node.kind in host_vendor(gpu.vendor).own_nodes for node in nodes):
        return ""
    return (
        f"nobody can tell here who has it open: kernel driver {gpu.driver} has it, and no usable node of it is there. "
        "Where a virtual machine has it, shut that down and unbind the GPU from its driver; where its node was removed "
        "or is another's (`unbounded-agent plan` says so), make it anew"
    )


def look(system: System, nodes: Iterable[DeviceNode]) -> Held:
    """Who has one of the nodes open, now."""
    return find_holders(system, {(node.number.major, node.number.minor): node.path for node in nodes})


def nobody(held: Held) -> str:
    """Where there is no holder."""
    return "nothing that can be looked at has it open" if held.unseen else "nothing has it open"


def describe(held: Held, gpu: Gpu) -> tuple[str, ...]:
    """A line for each process; of those that cannot be looked at, some: anybody may have many."""
    more = len(held.unseen) - UNSEEN_SHOWN
    counted = (f"and {more} more cannot be looked at",) if more > 0 else ()
    return (*(_with_advice(holder, gpu) for holder in held.holders), *held.unseen[:UNSEEN_SHOWN], *counted)


def _with_advice(holder: Holder, gpu: Gpu) -> str:
    advice = host_vendor(gpu.vendor).letting_go(holder.command, gpu.pci_address, in_machine=bool(holder.machine))
    return f"{holder.describe()}{f'; it lets go by {advice}' if advice else ''}"
