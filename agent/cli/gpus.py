"""`unbounded-agent gpus`: lists the host's GPUs, shows their users, tests them, takes them out of use, resets them."""

import argparse
from collections.abc import Iterator, Sequence

from msgspec import Struct, to_builtins

from agent.cli.output import document, report_problems, table
from agent.cli.printing import confirm, say
from agent.host import detach
from agent.host.gpu_recovery import work
from agent.host.gpu_reset import prepare
from agent.host.gpu_tests import TriedGpu, run_tests
from agent.host.plan.goal import Plan
from agent.host.reconcile import Reconciler
from agent.host.vendors import host_vendor
from agent.host.verify.gpu_states import LOST, gpu_state, health
from agent.model.contract import GpuTestEnd
from agent.model.facts import Absent, Broken, Facts, Gpu, Remembered, Unseen, Verdict
from agent.model.paths import PCI_DEVICES
from agent.model.text import printable, rfc3339
from agent.system.deadlines import read_device_text
from agent.system.files import System
from agent.system.trust import read_seen

HEADINGS = ("ADDRESS", "STATE", "HEALTH", "MACHINE", "DRIVER", "PODS", "MODEL", "UUID")
ATTRIBUTE_LIMIT = 200
"""At most this many characters of an attribute in sysfs are shown."""


class Entry(Struct, frozen=True, rename="camel", kw_only=True):
    """One GPU of the list, as in `gpus --json` (docs/json.md)."""

    address: str
    vendor: str
    model: str
    uuid: str
    driver: str = ""
    """The kernel driver's name, and its version if that is known."""
    state: str
    health: str = str(Verdict.UNKNOWN)
    """The verdict (docs/conditions.md#gpushealthy)."""
    health_reason: str = ""
    health_message: str = ""
    health_source: str = ""
    health_asked: str = ""
    """When the GPU itself answered last; empty if it has not."""
    health_silence: str = ""
    machines: Sequence[str]
    processes: int = 0
    """How many processes have it open."""
    pods: Sequence[str] = ()
    """UIDs of the pods of these processes."""
    users_known: bool
    """False if some processes could not be searched: then there may be more users."""
    test: str = ""
    """The result of the last test; empty if there was none."""
    tested_at: str | None = None


def run_lines(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print who has a GPU open."""
    say(detach.holders(options.address, reconciler))
    return 0


def run_forget(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Acknowledge that GPUs are gone for good; if no GPU is named, ask first. With --dry-run, only say which."""
    if options.dry_run or not options.address:
        lost, damage = detach.lost(options.address, reconciler)
        what = [gpu.describe() for gpu in lost.values()] + (["the damage to the record"] if damage else [])
        if options.dry_run:
            say(f"would forget {each}" for each in what)
            return 0
        if what:
            confirm(f"{', '.join(what)}: forget all of this", options)
    say(detach.forget(options.address, reconciler))
    return 0


def run_detach(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Take a GPU out of use, or give it back. Print what became of it, and return the exit code."""
    work = detach.detach if options.subcommand == "detach" else detach.attach
    ending = work(options.address, reconciler)
    say(ending.sentences)
    return 0 if ending.done else 1


def run_reset(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print what a reset would do. Without --dry-run, ask, reset, print what became of it; return the exit code."""
    reset = prepare(options.addresses, reconciler, evict=options.evict, seconds=options.timeout)
    say(reset.sentences())
    if options.dry_run:
        return 0
    confirm(f"{reset.names}: reset it as shown above", options)
    ending = reset.run()
    say(ending.sentences)
    if not reset.returned or not reset.to_test:
        return 0 if ending.done else 1
    tried = run_tests(reset.to_test, 0.0, False, reconciler)
    say(line for each in tried for line in _test_lines(each))
    return 0 if ending.done and all(each.end is GpuTestEnd.PASSED for each in tried) else 1


def run_recovery(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Reset and test GPUs for the service. How that has ended is in the record of GPUs."""
    work(reconciler)
    return 0


def run_test(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Test GPUs. Print what came of it, and return the exit code."""
    tried = run_tests(options.addresses, options.seconds, options.force, reconciler)
    if options.json:
        say([document("gpus test", {"gpus": [_as_json(each) for each in tried]})])
    else:
        say((line for each in tried for line in _test_lines(each)) if tried else ["no running machine has a GPU"])
    ends = {each.end for each in tried}
    if any(end.is_bad for end in ends):
        return 1
    return 0 if ends == {GpuTestEnd.PASSED} else 3


def _as_json(tried: TriedGpu) -> dict[str, object]:
    results = [
        {
            **{key: value for key, value in each._asdict().items() if key not in ("gpu", "finished")},
            "finishedAt": rfc3339(each.finished) if each.finished else None,
        }
        for each in tried.results
    ]
    known = {"address": tried.gpu.pci_address, "model": tried.gpu.model, "machine": tried.machine}
    return {**known, "result": tried.end, "results": results, "slowerThan": tried.slower, "alone": tried.alone}


FIGURES = {
    "memory_tested": "{} tested",
    "memory_bandwidth": "memory {}/s",
    "device_to_host": "to the host {}/s",
    "host_to_device": "from the host {}/s",
    "peer_to": "to it {}/s",
    "peer_from": "from it {}/s",
}
"""The figures of a test that are shown, in this order."""


def _test_lines(tried: TriedGpu) -> Iterator[str]:
    address, own = tried.gpu.pci_address, tried.gpu.uuid
    for each in tried.results:
        device = address if each.uuid in ("", own) else f"{address} {each.uuid}"
        device += f" with {each.peer}" if each.peer else ""
        shown = [text.format(_bytes(each.figures[name])) for name, text in FIGURES.items() if name in each.figures]
        if each.result is GpuTestEnd.PASSED and not each.peer:
            known = "uncorrected_errors" in each.figures
            shown.append("no new uncorrected ECC error" if known else "uncorrected ECC errors not known")
        took = f" ({each.figures['seconds']:.0f} s)" if "seconds" in each.figures else ""
        said = "; ".join(filter(None, (each.step and f"step {each.step}", each.message, ", ".join(shown))))
        yield f"{device} {each.result}{': ' if said else ''}{said}{took}"
    for name, best in tried.slower.items():
        has = _bytes(tried.results[0].figures.get(name, 0.0))
        figure = FIGURES[name].format(has)
        yield f"{address} is slower than its equals: {figure}, and the best of its model {_bytes(best)}/s"
    if tried.alone:
        yield f"{address} has no other GPU of its model to compare with in this test"


def _bytes(number: float) -> str:
    size, unit = next((each for each in ((1e12, "TB"), (1e9, "GB")) if number >= each[0]), (1e6, "MB"))
    return f"{number / size:.{0 if number >= 10 * size else 1}f} {unit}"


def list_gpus(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print the GPUs as a table, or as JSON. Return 1 if anything about them is unknown."""
    facts, planned, _ = reconciler.preview()
    entries = list(_entries(facts, planned, reconciler.system))
    unknown = tuple(_unseen(facts, planned))
    if options.json:
        say([document("gpus", {"gpus": to_builtins(entries), "unknown": unknown})])
        return 1 if unknown else 0
    rows: list[Sequence[str]] = [HEADINGS]
    for each in entries:
        pods = str(len(each.pods)) if each.users_known else f"{len(each.pods) or ''}?"
        machines = ",".join(each.machines)
        cells = (each.address, each.state, each.health, machines, each.driver, pods, each.model, each.uuid)
        rows.append(tuple(cell or "-" for cell in cells))
    say(table(rows) if entries else ["no GPU was found" if unknown else "this host has no GPU"])
    say(f"{each.address} {each.health}: {each.health_message}" for each in entries if each.health_message)
    say(f"unknown: {each}" for each in unknown)
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
    having = {(each.name, gpu) for each in planned.goal.machines for grant in each.grants for gpu in grant.gpus}
    # A machine that must not change now keeps its GPUs.
    having |= {(each.name, gpu) for each in facts.machines if each.name in planned.held for gpu in each.kept_gpus}
    known = [(gpu, vendor, host_vendor(gpu.vendor)) for vendor in facts.vendors for gpu in vendor.gpus]
    nodes = {
        gpu.pci_address: [n for n in detach.gpu_nodes(facts, gpu.pci_address) if n.kind in its_vendor.own_nodes]
        for gpu, _, its_vendor in known
    }
    held = detach.users(system, (node for each in nodes.values() for node in each))
    for gpu, vendor, its_vendor in known:
        address = gpu.pci_address
        machines = tuple(sorted(name for name, its_gpu in having if its_gpu == address))
        version = vendor.driver.module_version if vendor.driver and gpu.driver in its_vendor.drivers else ""
        paths = {node.path for node in nodes[address]}
        its_users = [each for each in held.holders if paths & set(each.paths)]
        # Numbers as `lspci -d` takes them.
        numbers = [_attribute(system, gpu, name).removeprefix("0x") for name in ("vendor", "device")]
        known_health, tested = health(gpu, facts), facts.gpus.tests.get(address)
        pci_id = f"PCI ID {':'.join(numbers)}" if all(numbers) else ""
        yield Entry(
            address=address,
            vendor=gpu.vendor,
            model=gpu.model or _attribute(system, gpu, "product_name") or pci_id,
            uuid=gpu.uuid or _attribute(system, gpu, "unique_id"),
            driver=" ".join(each for each in (gpu.driver, version) if isinstance(each, str) and each),
            state=gpu_state(gpu, vendor, machines),
            health=str(known_health.verdict),
            health_reason=known_health.reason,
            health_message=known_health.message,
            health_source=known_health.source,
            health_asked=rfc3339(known_health.asked) if known_health.asked else "",
            health_silence=known_health.silence,
            machines=machines,
            processes=len(its_users),
            pods=sorted({each.pod_uid for each in its_users if each.pod_uid}),
            users_known=not held.unseen,
            test=tested.result if tested else "",
            tested_at=rfc3339(tested.at) if tested else None,
        )
    remembered = planned.goal.remembered
    for each in remembered.gpus if isinstance(remembered, Remembered) else ():
        if each.lost:
            yield Entry(
                address=each.pci_address,
                vendor=each.vendor,
                model=each.model,
                uuid=each.uuid,
                state=LOST,
                machines=each.machines,
                users_known=not held.unseen,
            )


def _attribute(system: System, gpu: Gpu, name: str) -> str:
    """Return an attribute of the GPU in sysfs; empty if it is missing or cannot be read."""
    path = f"{PCI_DEVICES}/{gpu.pci_address}/{name}"
    text = read_seen(lambda attribute: read_device_text(system, attribute), path)
    return printable(text.strip())[:ATTRIBUTE_LIMIT] if isinstance(text, str) else ""
