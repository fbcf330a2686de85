"""`unbounded-agent gpus list`: lists the host's GPUs, with the machines that have them and the pods that use them."""

import argparse
from collections.abc import Iterator

from agent.cli.gpu_table import Entry, lines
from agent.cli.holders import gpu_nodes
from agent.cli.output import report_problems
from agent.cli.printing import say
from agent.cli.wiring import reconciler_for
from agent.host.plan.goal import Plan
from agent.host.reconcile import Reconciler
from agent.host.vendors import host_vendor
from agent.host.verify.gpu_list import LOST, gpu_state
from agent.model.facts import Absent, Broken, Facts, Gpu, Unseen, VendorFacts
from agent.model.paths import PCI_DEVICES
from agent.model.remembered import Remembered
from agent.model.text import printable
from agent.system.deadlines import read_device_text
from agent.system.files import System
from agent.system.seen import read_seen

ATTRIBUTE_LIMIT = 200
"""At most this many characters of an attribute in sysfs are shown."""


def run_gpus_list(options: argparse.Namespace) -> int:
    """Run `gpus list` with these options."""
    return list_gpus(reconciler_for(options), for_programs=options.json)


def list_gpus(reconciler: Reconciler, *, for_programs: bool) -> int:
    """Print the GPUs as a table, or as JSON. Return 1 if anything about them is unknown."""
    facts, planned, _ = reconciler.preview()
    entries = tuple(_entries(facts, planned, reconciler.system))
    unknown = tuple(_unseen(facts, planned))
    say(lines(entries, unknown, reconciler.system, for_programs=for_programs))
    if not for_programs:
        report_problems(facts)
    return 1 if unknown else 0


def _unseen(facts: Facts, planned: Plan) -> Iterator[str]:
    """Yield sentences on what is unknown."""
    for vendor in facts.vendors:
        if not isinstance(vendor.devices, tuple | Absent):
            yield vendor.devices.why
    remembered = planned.goal.remembered
    if isinstance(remembered, Broken | Unseen):
        yield f"whether a GPU was lost: {remembered.why}"
    for machine in facts.machines:
        if machine.name in planned.held and isinstance(machine.granted, Broken | Unseen):
            yield f"which GPUs machine {machine.name} has: {machine.granted.why}"


def _entries(facts: Facts, planned: Plan, system: System) -> Iterator[Entry]:
    having: dict[str, list[str]] = {}
    for name, address in sorted({*_granted(planned), *_kept(facts, planned)}):
        having.setdefault(address, []).append(name)
    for vendor in facts.vendors:
        for gpu in vendor.gpus:
            yield _entry(facts, gpu, vendor, tuple(having.get(gpu.pci_address, ())), system)
    remembered = planned.goal.remembered
    for each in remembered.gpus if isinstance(remembered, Remembered) else ():
        if each.lost:
            yield Entry(each.pci_address, each.vendor, LOST, each.machines, "", each.model, each.uuid)


def _granted(planned: Plan) -> Iterator[tuple[str, str]]:
    """Yield a machine and an address for each GPU that a machine gets."""
    for machine in planned.goal.machines:
        for grant in machine.grants:
            yield from ((machine.name, address) for address in grant.gpus)


def _kept(facts: Facts, planned: Plan) -> Iterator[tuple[str, str]]:
    """Yield a machine and an address for each GPU of a machine that must not change now, and so keeps its GPUs."""
    for machine in facts.machines:
        if machine.name in planned.held:
            yield from ((machine.name, address) for address in machine.kept_gpus)


def _entry(facts: Facts, gpu: Gpu, vendor: VendorFacts, machines: tuple[str, ...], system: System) -> Entry:
    its_vendor = host_vendor(gpu.vendor)
    version = vendor.driver.module_version if vendor.driver and gpu.driver in its_vendor.drivers else ""
    return Entry(
        gpu.pci_address,
        gpu.vendor,
        gpu_state(gpu, vendor, machines),
        machines,
        " ".join(each for each in (gpu.driver, version) if isinstance(each, str) and each),
        gpu.model or _attribute(system, gpu, "product_name") or _pci_id(system, gpu),
        gpu.uuid or _attribute(system, gpu, "unique_id"),
        tuple(node for node in gpu_nodes(facts, gpu.pci_address) if node.kind in its_vendor.own_nodes),
    )


def _attribute(system: System, gpu: Gpu, name: str) -> str:
    """Return an attribute of the GPU in sysfs; empty if it is missing or cannot be read."""
    path = f"{PCI_DEVICES}/{gpu.pci_address}/{name}"
    text = read_seen(lambda attribute: read_device_text(system, attribute), path)
    return printable(text.strip())[:ATTRIBUTE_LIMIT] if isinstance(text, str) else ""


def _pci_id(system: System, gpu: Gpu) -> str:
    """Return `PCI ID VENDOR:DEVICE`, with numbers as `lspci -d` takes them; empty if they cannot be read."""
    numbers = [_attribute(system, gpu, name).removeprefix("0x") for name in ("vendor", "device")]
    return f"PCI ID {':'.join(numbers)}" if all(numbers) else ""
