"""`unbounded-agent gpus`: lists the host's GPUs, with the machines that have them and the pods that use them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from agent.cli.documents import document
from agent.cli.holders import gpu_nodes
from agent.cli.output import report_problems
from agent.cli.printing import say
from agent.host.plan.goal import Plan
from agent.host.reconcile import Reconciler
from agent.host.vendors import host_vendor
from agent.host.verify.gpu_list import LOST, gpu_state
from agent.model.facts import Absent, Broken, DeviceNode, Facts, Gpu, Unseen, VendorFacts
from agent.model.remembered import Remembered
from agent.model.text import printable
from agent.system.files import System
from agent.system.open_files import Held, Holder, find_holders
from agent.system.seen import read_seen

HEADINGS = ("ADDRESS", "STATE", "MACHINE", "DRIVER", "PODS", "MODEL", "UUID")
UNKNOWN = "?"
NOTHING = "-"
ATTRIBUTE_LIMIT = 200
"""Characters of the longest attribute that is shown."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One GPU of the list."""

    address: str
    vendor: str
    state: str
    machines: tuple[str, ...] = ()
    driver: str = ""
    """The kernel driver's name, and its version if that is known."""
    model: str = ""
    uuid: str = ""
    processes: int = 0
    """How many processes have it open."""
    pods: tuple[str, ...] = ()
    """UIDs of the pods that have it open."""
    users_known: bool = True
    """Whether all processes could be searched. If not, there may be more processes and pods."""


def list_gpus(reconciler: Reconciler, *, for_programs: bool) -> int:
    """Print the GPUs as a table, or as JSON. Return 1 if some could not be observed."""
    facts, planned, _ = reconciler.preview()
    entries = tuple(_entries(facts, planned, reconciler.system))
    unseen = tuple(_unseen(facts, planned))
    if for_programs:
        say([document("gpus", time.time(), {"gpus": [_as_object(each) for each in entries], "unknown": unseen})])
    else:
        say(_table(entries) if entries else ["no GPU was found"] if unseen else ["this host has no GPU"])
        say(f"unknown: {each}" for each in unseen)
        report_problems(facts)
    return 1 if unseen else 0


def _unseen(facts: Facts, planned: Plan) -> Iterator[str]:
    for vendor in facts.vendors:
        if not isinstance(vendor.devices, tuple | Absent):
            yield vendor.devices.why
    remembered = planned.goal.remembered
    if isinstance(remembered, Broken | Unseen):
        yield f"whether a GPU was lost: {remembered.why}"
    for name, why in planned.held.items():
        yield f"which GPUs machine {name} gets: {why}"


def _entries(facts: Facts, planned: Plan, system: System) -> Iterator[Entry]:
    granted: dict[str, list[str]] = {}
    for machine in planned.goal.machines:
        for grant in machine.grants:
            for address in grant.gpus:
                granted.setdefault(address, []).append(machine.name)
    nodes = {node.path: node for vendor in facts.vendors for gpu in vendor.gpus for node in _own_nodes(facts, gpu)}
    held = find_holders(system, {(node.number.major, node.number.minor): path for path, node in nodes.items()})
    for vendor in facts.vendors:
        for gpu in vendor.gpus:
            paths = {node.path for node in _own_nodes(facts, gpu)}
            users = [each for each in held.holders if paths & set(each.paths)]
            yield _entry(gpu, vendor, tuple(granted.get(gpu.pci_address, ())), users, held, system)
    remembered = planned.goal.remembered
    for lost in remembered.gpus if isinstance(remembered, Remembered) else ():
        if lost.lost:
            yield Entry(lost.pci_address, lost.vendor, LOST, lost.machines, "", lost.model, lost.uuid)


def _own_nodes(facts: Facts, gpu: Gpu) -> list[DeviceNode]:
    own = host_vendor(gpu.vendor).own_nodes
    return [node for node in gpu_nodes(facts, gpu.pci_address) if node.kind in own]


def _entry(
    gpu: Gpu, vendor: VendorFacts, machines: tuple[str, ...], users: list[Holder], held: Held, system: System
) -> Entry:
    version = vendor.driver.module_version if vendor.driver and gpu.driver in host_vendor(gpu.vendor).drivers else ""
    return Entry(
        gpu.pci_address,
        gpu.vendor,
        gpu_state(gpu, vendor, machines),
        machines,
        " ".join(each for each in (gpu.driver, version) if isinstance(each, str) and each),
        gpu.model or _attribute(system, gpu, "product_name") or _pci_id(system, gpu),
        gpu.uuid or _attribute(system, gpu, "unique_id"),
        len(users),
        tuple(sorted({each.pod_uid for each in users if each.pod_uid})),
        not held.unseen,
    )


def _attribute(system: System, gpu: Gpu, name: str) -> str:
    """Return an attribute of the GPU in sysfs, which only some drivers have; empty if there is none."""
    data = read_seen(system.read, f"/sys/bus/pci/devices/{gpu.pci_address}/{name}")
    return printable(data.decode(errors="replace").strip())[:ATTRIBUTE_LIMIT] if isinstance(data, bytes) else ""


def _pci_id(system: System, gpu: Gpu) -> str:
    """Return vendor and device ID, as `lspci -d` takes them."""
    numbers = [_attribute(system, gpu, name).removeprefix("0x") for name in ("vendor", "device")]
    return f"PCI ID {':'.join(numbers)}" if all(numbers) else ""


def _as_object(entry: Entry) -> dict[str, object]:
    return {
        "address": entry.address,
        "vendor": entry.vendor,
        "model": entry.model,
        "uuid": entry.uuid,
        "driver": entry.driver,
        "state": entry.state,
        "machines": entry.machines,
        "processes": entry.processes,
        "pods": entry.pods,
        "usersKnown": entry.users_known,
    }


def _table(entries: tuple[Entry, ...]) -> Iterator[str]:
    rows = [HEADINGS, *(_row(each) for each in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(entry: Entry) -> tuple[str, ...]:
    pods = str(len(entry.pods)) if entry.users_known else f"{len(entry.pods) or ''}{UNKNOWN}"
    machines = ",".join(entry.machines)
    cells = (entry.address, entry.state, machines, entry.driver, pods, entry.model, entry.uuid)
    return tuple(each or NOTHING for each in cells)
