"""Lists the processes that use a GPU: `unbounded-agent gpus holders`."""

import argparse
from collections.abc import Iterable
from typing import TypeVar

from agent.cli.printing import say
from agent.cli.wiring import reconciler_for
from agent.host.reconcile import Reconciler
from agent.host.vendors import host_vendor
from agent.model.errors import ConfigError, ObservationError
from agent.model.facts import DeviceNode, Facts, Gpu
from agent.model.pci_address import as_in_sysfs
from agent.model.remembered import RememberedGpu
from agent.system.files import System
from agent.system.open_files import Held, Holder, find_holders

T = TypeVar("T", Gpu, RememberedGpu)

UNSEEN_SHOWN = 10
"""At most this many processes that could not be inspected are listed; the others are only counted."""


def run_holders(options: argparse.Namespace) -> int:
    """Run `gpus holders` with these options."""
    say(holders(options.address, reconciler_for(options)))
    return 0


def holders(address: str, reconciler: Reconciler) -> tuple[str, ...]:
    """Return lines about the users of the GPU at `address`; if `address` is empty, about the users of each GPU."""
    facts = reconciler.preview()[0]
    gpus = [find_gpu(address, facts)] if address else list(_known(facts).values())
    lines: list[str] = []
    for gpu in gpus:
        nodes = gpu_nodes(facts, gpu.pci_address)
        held = users(reconciler.system, nodes)
        unknown = why_unknown(gpu, nodes)
        described = describe(held, gpu) if held or unknown else (no_holder(held), *describe(held, gpu))
        lines += [f"{gpu.pci_address}: {line}" for line in (*described, unknown) if line]
    return tuple(lines) or ("this host has no GPU",)


def find_gpu(address: str, facts: Facts) -> Gpu:
    """Return the GPU with this PCI address or UUID.

    Raises ConfigError if there is none, and ObservationError if a vendor's devices cannot be listed.
    """
    known = _known(facts)
    found = named(address, known.values())
    if found is None:
        raise ConfigError(
            f"{address!a}: no GPU has this PCI address or UUID", f"GPUs here: {', '.join(sorted(known)) or 'none'}"
        )
    return found


def named(word: str, gpus: Iterable[T]) -> T | None:
    """Return the GPU with this PCI address or UUID; None if there is none."""
    address = as_in_sysfs(word)
    return next((each for each in gpus if each.pci_address == address or (word and each.uuid == word)), None)


def _known(facts: Facts) -> dict[str, Gpu]:
    """Return the GPUs by address. Raises ObservationError if a vendor's devices cannot be listed."""
    for vendor in facts.vendors:
        if not isinstance(vendor.devices, tuple):
            raise ObservationError(vendor.devices.why, "without this list, a GPU's users cannot be found")
    return {gpu.pci_address: gpu for vendor in facts.vendors for gpu in vendor.gpus}


def gpu_nodes(facts: Facts, address: str) -> tuple[DeviceNode, ...]:
    """Return the nodes of the GPU and of its partitions, but not nodes that several GPUs share."""
    lists = (vendor.devices for vendor in facts.vendors if isinstance(vendor.devices, tuple))
    return tuple(node for nodes in lists for node in nodes if node.pci_address == address)


def why_unknown(gpu: Gpu, nodes: Iterable[DeviceNode]) -> str:
    """Return why the users of the GPU cannot be found by the numbers of its nodes.

    Empty if they can be found, or if the GPU has no kernel driver and so no users.
    """
    if not gpu.driver or any(node.kind in host_vendor(gpu.vendor).own_nodes for node in nodes):
        return ""
    return (
        f"cannot determine who uses it: it is bound to kernel driver {gpu.driver} and has no usable device node. "
        "If a virtual machine has it, shut down the virtual machine and unbind the GPU from its driver. If its node "
        "was removed or has another device's number (`unbounded-agent plan` says so), create the node again"
    )


def users(system: System, nodes: Iterable[DeviceNode]) -> Held:
    """Return the processes that have one of the nodes open now."""
    return find_holders(system, {(node.number.major, node.number.minor): node.path for node in nodes})


def no_holder(held: Held) -> str:
    """Return the sentence for a GPU that no process was found to have open."""
    return "no process that could be inspected has it open" if held.unseen else "no process has it open"


def describe(held: Held, gpu: Gpu) -> tuple[str, ...]:
    """Return a line per process.

    Of the processes that cannot be inspected, list at most UNSEEN_SHOWN, because a pod may have many.
    """
    more = len(held.unseen) - UNSEEN_SHOWN
    counted = (f"and {more} more cannot be inspected",) if more > 0 else ()
    return (*(_with_advice(holder, gpu) for holder in held.holders), *held.unseen[:UNSEEN_SHOWN], *counted)


def _with_advice(holder: Holder, gpu: Gpu) -> str:
    advice = host_vendor(gpu.vendor).release_advice(holder.command, gpu.pci_address, in_machine=bool(holder.machine))
    return f"{holder.describe()}{f'; to release it: {advice}' if advice else ''}"
