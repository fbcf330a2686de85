"""`unbounded-agent gpus list`: lists the host's GPUs, with the machines that have them and the pods that use them."""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from msgspec import Struct, field, to_builtins

from agent.cli.output import document, report_problems
from agent.cli.printing import say
from agent.cli.wiring import reconciler_for
from agent.config.settings import Config, MachineSettings
from agent.host.apply.steps import write_file
from agent.host.plan.goal import Plan, remembered_files
from agent.host.plan.nspawn import node_by_number
from agent.host.reconcile import MachineOutcome, Outcome, Reconciler
from agent.host.state.gpus import forget_detached, forget_fault, observe_gpus, record_detached, record_tainted
from agent.host.state.locks import detach_lock, pass_lock
from agent.host.vendors import host_vendor
from agent.host.verify.answers import STALE_AFTER, names_handoff
from agent.host.verify.gpu_states import LOST, gpu_state
from agent.model.conditions import ConditionType, Reason, Status
from agent.model.device import as_in_sysfs
from agent.model.errors import AgentError, ConfigError
from agent.model.facts import (
    Absent,
    Broken,
    DeviceNode,
    Facts,
    Gpu,
    Granted,
    MachineFacts,
    Remembered,
    RememberedGpu,
    Report,
    Unseen,
)
from agent.model.goal import WriteFile
from agent.model.handoff import DRA
from agent.model.paths import PCI_DEVICES, WAKE, granted_file, handoff_file
from agent.model.text import printable, restart_command
from agent.system.deadlines import read_device_text
from agent.system.files import System
from agent.system.processes import Held, Holder, find_holders
from agent.system.trust import read_seen, write_record

# Lists the processes that use a GPU: `unbounded-agent gpus holders`.


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

    Raises ConfigError if there is none, and AgentError if a vendor's devices cannot be listed.
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
    """Return the GPUs by address. Raises AgentError if a vendor's devices cannot be listed."""
    for vendor in facts.vendors:
        if not isinstance(vendor.devices, tuple):
            raise AgentError(vendor.devices.why, "without this list, a GPU's users cannot be found")
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


# `unbounded-agent gpus list`


HEADINGS = ("ADDRESS", "STATE", "MACHINE", "DRIVER", "PODS", "MODEL", "UUID")
ATTRIBUTE_LIMIT = 200
"""At most this many characters of an attribute in sysfs are shown."""


class Entry(Struct, frozen=True, rename="camel"):
    """One GPU of the list, as in `gpus --json` (docs/json.md)."""

    address: str
    vendor: str
    model: str
    uuid: str
    driver: str
    """The kernel driver's name, and its version if that is known."""
    state: str
    machines: Sequence[str]
    processes: int
    """How many processes have it open."""
    pods: Sequence[str]
    """UIDs of the pods of these processes."""
    users_known: bool
    """False if some processes could not be searched: then there may be more users."""

    def row(self) -> tuple[str, ...]:
        """Return the cells of its line in the table."""
        pods = str(len(self.pods)) if self.users_known else f"{len(self.pods) or ''}?"
        cells = (self.address, self.state, ",".join(self.machines), self.driver, pods, self.model, self.uuid)
        return tuple(each or "-" for each in cells)


def run_gpus_list(options: argparse.Namespace) -> int:
    """Run `gpus list` with these options."""
    return list_gpus(reconciler_for(options), for_programs=options.json)


def list_gpus(reconciler: Reconciler, *, for_programs: bool) -> int:
    """Print the GPUs as a table, or as JSON. Return 1 if anything about them is unknown."""
    facts, planned, _ = reconciler.preview()
    entries = list(_entries(facts, planned, reconciler.system))
    unknown = tuple(_unseen(facts, planned))
    if for_programs:
        say([document("gpus", time.time(), {"gpus": to_builtins(entries), "unknown": unknown})])
        return 1 if unknown else 0
    if entries:
        rows = [HEADINGS, *(each.row() for each in entries)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        say("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    else:
        say(["no GPU was found" if unknown else "this host has no GPU"])
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
        gpu.pci_address: [each for each in gpu_nodes(facts, gpu.pci_address) if each.kind in its_vendor.own_nodes]
        for gpu, _, its_vendor in known
    }
    held = users(system, (node for each in nodes.values() for node in each))
    for gpu, vendor, its_vendor in known:
        address = gpu.pci_address
        machines = tuple(sorted(name for name, its_gpu in having if its_gpu == address))
        version = vendor.driver.module_version if vendor.driver and gpu.driver in its_vendor.drivers else ""
        paths = {node.path for node in nodes[address]}
        its_users = [each for each in held.holders if paths & set(each.paths)]
        yield Entry(
            address,
            gpu.vendor,
            gpu.model or _attribute(system, gpu, "product_name") or _pci_id(system, gpu),
            gpu.uuid or _attribute(system, gpu, "unique_id"),
            " ".join(each for each in (gpu.driver, version) if isinstance(each, str) and each),
            gpu_state(gpu, vendor, machines),
            machines,
            len(its_users),
            sorted({each.pod_uid for each in its_users if each.pod_uid}),
            not held.unseen,
        )
    remembered = planned.goal.remembered
    for each in remembered.gpus if isinstance(remembered, Remembered) else ():
        if each.lost:
            yield Entry(
                *(each.pci_address, each.vendor, each.model, each.uuid, "", LOST, each.machines, 0, ()),
                users_known=not held.unseen,
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


# Finds the machines that have a certain GPU, or may still open it.


def granted_to(address: str, facts: Facts, planned: Plan, config: Config) -> tuple[str, ...]:
    """Return the machines that have the GPU, would have it if it were not detached, or may still open it.

    Raises AgentError if a machine may run, or start, with the GPU, and its settings cannot be changed now.
    """
    for machine in facts.machines:
        # If a configured machine has ended, its settings can still be changed: they are written before its next start.
        cannot_change = machine.name in planned.held and not (machine.stays_ended and machine.name in config.machines)
        granted_now = machine.granted
        may_have = (
            address in granted_now.gpus if isinstance(granted_now, Granted) else not isinstance(granted_now, Absent)
        )
        if cannot_change and may_have:
            raise AgentError(f"cannot change machine {machine.name}: {planned.held[machine.name]}")
    # A machine that may still open the GPU counts too, even if it has been granted another GPU instead.
    devices = device_numbers(gpu_nodes(facts, address))
    permitted = {machine.name for machine in facts.machines if may_open(machine, devices)}
    return tuple(
        sorted(
            machine.name
            for machine in planned.goal.machines
            if machine.name in permitted or any(address in (*grant.gpus, *grant.detached) for grant in machine.grants)
        )
    )


def device_numbers(nodes: Iterable[DeviceNode]) -> set[str]:
    """Return the nodes' numbers in the form of DeviceAllow= entries."""
    return {node_by_number(node.number) for node in nodes}


def may_open(machine: MachineFacts, devices: set[str]) -> bool:
    """Return whether the machine is known to be permitted to open one of the devices."""
    return machine.live is not None and any(entry.node in devices for entry in machine.live.allow)


# `unbounded-agent gpus forget`: acknowledges that GPUs are gone for good.


def run_forget(options: argparse.Namespace) -> int:
    """Run `gpus forget` with these options."""
    say(forget(options.address, reconciler_for(options)))
    return 0


def forget(address: str, reconciler: Reconciler) -> tuple[str, ...]:
    """Forget the lost GPU at this address. Without an address, forget all lost GPUs, and acknowledge a damaged record.

    Return lines that say what was forgotten. Raises ConfigError if no lost GPU has the address, and AgentError
    if the record cannot be read.
    """
    with pass_lock(reconciler.system, reconciler.progress):
        # Take the GPUs from a plan, not from the record: if the service is not running, the record may be out of date.
        remembered = reconciler.preview()[1].goal.remembered
        if isinstance(remembered, Absent | Broken | Unseen):
            hint = "make this record of granted GPUs readable, then run the command again"
            raise AgentError(remembered.why, hint)
        lost = {gpu.pci_address: gpu for gpu in remembered.gpus if gpu.lost}
        if address:
            gpu = named(address, lost.values())
            if gpu is None:
                hint = f"lost GPUs: {', '.join(lost)}" if lost else "no GPU is lost"
                raise ConfigError(f"{address!a}: no lost GPU has this PCI address or UUID", hint)
            lost = {gpu.pci_address: gpu}
        damage = remembered.damage if address else ""
        gpus = tuple(gpu for gpu in remembered.gpus if gpu.pci_address not in lost)
        for file in remembered_files(Remembered(gpus, damage)):
            write_record(reconciler.system, file.path, file.content)
        if gpus != remembered.gpus or damage != remembered.damage:
            # Wake the service: its metrics and the machines' Node objects show the loss until its next pass. Write the
            # file under the lock, because a pass at the same time would remove the temporary file (HOST_FILES).
            with suppress(OSError):
                reconciler.system.write(WAKE, b"")
    lines = [
        f"{gpu.describe()} is forgotten, and no longer missing in: {', '.join(gpu.machines)}" for gpu in lost.values()
    ]
    if remembered.damage != damage:
        lines.append("the damage to the record is acknowledged: the agent remembers GPUs again from now on")
    return tuple(lines) or ("no GPU is lost: nothing to do",)


# `unbounded-agent gpus detach`: takes a GPU out of use, so that it can be removed.
#
# This command and `attach` make their own passes, whether or not the service runs, because the service's sandbox hides
# what other processes have open.


POLICIES = ("refuse", "drain-wait", "force")
"""Values of agent.config.settings.MachineSettings.on_detach, the most careful first."""


class Timing(Struct, frozen=True):
    """Intervals and limits, in seconds."""

    poll: float = 1.0
    answer: float = STALE_AFTER + 60.0
    """Limit for the machines' reports. By then, the host has withdrawn the permission even from a machine that reports
    nothing."""
    report_interval: float = 15.0
    """Interval between two progress messages."""
    taint: float = 5.0
    """Time from a taint until no scheduler allocates the GPU. agent.dra and the API server need about one second."""
    eviction: float = 90.0
    """Limit for evicted pods to end. By default, a pod is killed 30 seconds after SIGTERM."""


class Ending(Struct, frozen=True):
    """The result of a command, in sentences."""

    done: bool
    sentences: tuple[str, ...]

    def print(self) -> int:
        """Print the sentences, and return the exit code."""
        say(self.sentences)
        return 0 if self.done else 1


def run_detach(options: argparse.Namespace) -> int:
    """Run `gpus detach` with these options."""
    return detach(options.address, reconciler_for(options)).print()


def detach(address: str, reconciler: Reconciler, timing: Timing = Timing()) -> Ending:
    """Take the GPU out of use. Raises ConfigError for an unknown address, or another AgentError.

    The result is `done` if no machine may open the GPU, and no process that can be inspected has it open.
    """
    facts, planned, _ = reconciler.preview()
    gpu = find_gpu(address, facts)
    machines = granted_to(gpu.pci_address, facts, planned, reconciler.config)
    nodes = gpu_nodes(facts, gpu.pci_address)
    if unknown := why_unknown(gpu, nodes):
        return Ending(False, (f"{gpu.pci_address} was not detached: {unknown}",))
    with detach_lock(reconciler.system, gpu.pci_address):
        found = gpu.pci_address in observe_gpus(reconciler.system).tainted
        return Removal(gpu, machines, nodes, reconciler, timing, found).run()


class Removal(Struct):
    """Takes one GPU from its machines, or gives it back to them."""

    gpu: Gpu
    machines: tuple[str, ...]
    """Machines that have the GPU, would have it if it were not detached, or may still open it."""
    nodes: tuple[DeviceNode, ...]
    reconciler: Reconciler
    timing: Timing
    found: bool = False
    """Whether the GPU was already recorded as detached or tainted. If so, this command must not undo that record."""
    remarks: list[str] = field(default_factory=list)
    """What went wrong, one sentence each."""
    recorded: bool = False
    """Whether this command has recorded the GPU as detached or tainted, and has not undone that."""

    def run(self) -> Ending:
        """Keep new pods from the GPU, wait until its users have exited, then withdraw the machines' permission.

        If the GPU is in use, on_detach decides: `drain-wait` waits, `refuse` gives up, and `force` withdraws the
        permission nevertheless.
        """
        policy, seconds = self._policy()
        if policy == "refuse" and (held := self._users()):
            return self._in_use("is in use; nothing was changed (on_detach is refuse)", held)
        try:
            return self._detach(policy, seconds)
        except BaseException:
            self._clean_up(policy)
            raise

    def _detach(self, policy: str, seconds: int) -> Ending:
        address, left = self.gpu.pci_address, seconds
        if self._is_offered(self.machines):
            # First only taint the GPU. It stays in the CDI specification, so that containers of its pods can restart.
            started, limits = time.monotonic(), {"refuse": 0, "drain-wait": seconds, "force": self.timing.eviction}
            self._taint(evict=policy == "force")
            held = self._drain(limits[policy])
            if held and policy != "force":
                return self._still_used(policy, seconds, held)
            left = max(0, seconds - int(time.monotonic() - started))
        if policy != "force":
            self._record(partial(record_detached, draining=True))
            self.passes(f"remove {address} from its CDI specification", self.not_reported)
            if held := self._drain(left if policy == "drain-wait" else 0):
                return self._still_used(policy, seconds, held)
        self._record(partial(record_detached, draining=False))
        outcome = self.passes(f"release {address}", self._permitted)
        permitted = (*self._permitted(outcome), *self._without_record(outcome))
        if held := self._users():
            return self._in_use("is no longer granted to any machine, but is still in use: do not remove it yet", held)
        self._require_record()
        if permitted:
            return Ending(
                False, (f"do not remove {address} yet: {', '.join(permitted)} can still open it", *self.remarks)
            )
        until = f"until it has left the PCI bus, or `unbounded-agent gpus attach {address}` gives it back"
        what = f"{address} may be removed: {no_holder(held)}; no machine gets it {until}"
        return Ending(True, (what, *describe(held, self.gpu), *self.remarks))

    def _still_used(self, policy: str, seconds: int, held: Held) -> Ending:
        if policy == "refuse" and not self.found:
            self.attach_again()
            return self._in_use("was opened in the meantime, and is granted as before (on_detach is refuse)", held)
        waited = "" if policy == "refuse" else f" after {seconds} s"
        what = f"is withheld from new pods, but is still in use{waited}"
        attach = f"`unbounded-agent gpus attach {self.gpu.pci_address}`"
        return self._in_use(f"{what}; repeat this command to keep waiting, or run {attach} to give it back", held)

    def _is_offered(self, names: Iterable[str]) -> bool:
        """Return whether one of the machines offers its GPUs by DRA, which can keep new pods from a single GPU."""
        return any(self.reconciler.config.machines[name].allocation == DRA for name in names)

    def _taint(self, *, evict: bool) -> None:
        """Keep new pods from the GPU by a taint, and wait until schedulers respect it."""
        self._record(partial(record_tainted, evict=evict))
        outcome = self.reconciler.reconcile()
        if self._is_offered(machine.name for machine in self._running(outcome)):
            seconds = self.timing.taint
            self.reconciler.progress(f"waiting {seconds:.0f} s until no new pod gets {self.gpu.pci_address}")
            time.sleep(seconds)

    def attach_again(self) -> Outcome:
        """Forget that the GPU is detached, and wait until the machines have it again."""
        self._forget()
        return self.passes(f"get {self.gpu.pci_address} back", self.not_reported)

    def _forget(self) -> None:
        with pass_lock(self.reconciler.system, self.reconciler.progress):
            forget_detached(self.reconciler.system, self.gpu.pci_address)
        self.recorded = False

    def _clean_up(self, policy: str) -> None:
        """After an error, undo the detachment, or report that the GPU stays detached.

        The detachment is undone only under policy `refuse`, and only if this command made it.
        """
        address = self.gpu.pci_address
        if address not in observe_gpus(self.reconciler.system).tainted:
            return
        if policy == "refuse" and not self.found:
            try:
                self._forget()
            except (AgentError, OSError) as error:
                self.reconciler.progress(f"{address} could not be given back: {error}")
            else:
                self.reconciler.progress(f"{address} is no longer detached: the next pass grants it as before")
                return
        self.reconciler.progress(f"{address} is still detached; `unbounded-agent gpus attach {address}` gives it back")

    def _policy(self) -> tuple[str, int]:
        """Return the most careful policy of the GPU's machines, and their longest drain_wait."""
        configured = self.reconciler.config.machines
        settings = [configured[name] for name in self.machines] or [MachineSettings()]
        policy = min((each.on_detach for each in settings), key=POLICIES.index)
        return policy, max(each.drain_wait for each in settings)

    def _users(self) -> Held:
        self.reconciler.progress(f"checking which processes have {self.gpu.pci_address} open")
        return users(self.reconciler.system, self.nodes)

    def _drain(self, seconds: float) -> Held:
        """Wait until no process has the GPU open, or time is up. Return the processes that still have it open."""
        deadline, next_report = time.monotonic() + seconds, 0.0
        while (held := users(self.reconciler.system, self.nodes)) and time.monotonic() < deadline:
            self._require_record()
            if time.monotonic() >= next_report:
                remaining = deadline - time.monotonic()
                for line in describe(held, self.gpu):
                    self.reconciler.progress(f"waiting up to {remaining:.0f} s for {line}")
                next_report = time.monotonic() + self.timing.report_interval
            time.sleep(self.timing.poll)
        return held

    def _record(self, record: Callable[[System, str], bool]) -> None:
        with pass_lock(self.reconciler.system, self.reconciler.progress):
            if self.recorded:
                self._require_record()
            if not record(self.reconciler.system, self.gpu.pci_address):
                raise AgentError(f"{self.gpu.pci_address} has left the PCI bus in the meantime")
            self.recorded = True

    def _require_record(self) -> None:
        """Raises AgentError if the GPU is no longer recorded: this command must not undo what somebody else did."""
        if self.gpu.pci_address not in observe_gpus(self.reconciler.system).tainted:
            raise AgentError(f"{self.gpu.pci_address} was attached, or left the PCI bus, in the meantime")

    def passes(self, what: str, waiting: Callable[[Outcome], list[str]]) -> Outcome:
        """Make passes until `waiting` returns no machine, or time is up. Return the last outcome. Raises AgentError.

        Adds to the remarks: failures of the machines in the last pass, late machines, and machines without a record.
        """
        started, next_report = time.monotonic(), 0.0
        while True:
            outcome = self.reconciler.reconcile()
            names, waited = waiting(outcome), time.monotonic() - started
            if not names or waited > self.timing.answer:
                break
            if self.recorded:
                self._require_record()
            if waited >= next_report:
                self.reconciler.progress(f"waiting for {', '.join(names)} to {what}")
                next_report = waited + self.timing.report_interval
            time.sleep(self.timing.poll)
        self.remarks += outcome.failures_of(self.machines)
        self.remarks += [f"machine {name} did not {what}: see `unbounded-agent status`" for name in names]
        self.remarks += [
            f"machine {name} was started without this agent's settings, or the record of its devices is lost: "
            f"only {restart_command(name)} withdraws the GPU"
            for name in self._without_record(outcome)
        ]
        return outcome

    def _running(self, outcome: Outcome) -> list[MachineFacts]:
        affected = (each for each in outcome.facts.machines if each.name in self.machines)
        return [machine for machine in affected if not machine.ended]

    def not_reported(self, outcome: Outcome) -> list[str]:
        return [machine.name for machine in self._running(outcome) if not has_reported(machine)]

    def _permitted(self, outcome: Outcome) -> list[str]:
        """Return the machines that may still open the GPU."""
        return [each.name for each in self._running(outcome) if may_open(each, device_numbers(self.nodes))]

    def _without_record(self, outcome: Outcome) -> list[str]:
        """Return the running machines whose devices cannot be withdrawn, because no record lists their devices."""
        return [machine.name for machine in self._running(outcome) if machine.live is None]

    def _in_use(self, what: str, held: Held) -> Ending:
        return Ending(False, (f"{self.gpu.pci_address} {what}", *describe(held, self.gpu), *self.remarks))


def has_reported(machine: MachineFacts) -> bool:
    """Return whether the machine has reported on its present handoff."""
    report, granted = machine.report, machine.granted
    if not isinstance(report, Report) or not isinstance(granted, Granted):
        return False
    return names_handoff(report, machine, granted.generation)


# `unbounded-agent gpus attach`: gives a detached GPU back, and lets machines open a GPU again that was repaired.


NOT_REGISTERED = (Reason.FABRIC_REGISTERING, Reason.FABRIC_NOT_REGISTERED, Reason.FABRIC_FAILED)
"""Reasons of FabricReady that rest on what GPUs say. A reset may have changed it."""


def run_attach(options: argparse.Namespace) -> int:
    """Run `gpus attach` with these options."""
    return attach(options.address, reconciler_for(options)).print()


def attach(address: str, reconciler: Reconciler, timing: Timing = Timing()) -> Ending:
    """Undo a detachment, forget the GPU's last fatal error, and wait until the machines have the GPU.

    If the GPU is not detached, machines that fail to open a GPU try again at once.

    Raises ConfigError for an unknown address, or another AgentError.
    """
    facts, planned, _ = reconciler.preview()
    gpu = find_gpu(address, facts)
    recovered = _forget_fault(gpu.pci_address, reconciler)
    if not gpu.detached and gpu.pci_address not in facts.gpus.tainted:
        return _open_again(gpu, recovered, reconciler, timing)
    machines = granted_to(gpu.pci_address, facts, planned, reconciler.config)
    outcome = (removal := Removal(gpu, machines, (), reconciler, timing)).attach_again()
    names = ", ".join(machine.name for machine in outcome.machines if gpu.pci_address in machine.gpus)
    what = f"was given back to {names}" if names else "is no longer detached; no machine's settings ask for it"
    return Ending(not removal.remarks, (f"{gpu.pci_address} {what}", *recovered, *removal.remarks))


def _forget_fault(address: str, reconciler: Reconciler) -> tuple[str, ...]:
    """Forget the GPU's last fatal error, because the administrator knows that the GPU works again.

    Return a sentence that says so; nothing if no error was recorded.
    """
    with pass_lock(reconciler.system, reconciler.progress):
        if not forget_fault(reconciler.system, address):
            return ()
    reconciler.reconcile()
    return (f"{address} counts as healthy again: its last fatal error is forgotten",)


def _open_again(gpu: Gpu, recovered: tuple[str, ...], reconciler: Reconciler, timing: Timing) -> Ending:
    """Let the machines try again that have the GPU and fail to open a GPU: nothing else tells them of a reset."""
    address, outcome = gpu.pci_address, reconciler.reconcile()
    have = {each.name: each for each in outcome.machines if address in each.gpus}
    names = tuple(each.name for each in outcome.facts.machines if each.name in have and _fails(each, have[each.name]))
    if not names:
        return Ending(True, recovered or (f"{address} is not detached: nothing to do",))
    removal = Removal(gpu, names, (), reconciler, timing)
    with pass_lock(reconciler.system, reconciler.progress):
        # As in agent.host.plan.diff, the record comes first: its time shows when the handoff was last published.
        for path in (file(name) for name in names for file in (granted_file, handoff_file)):
            write_file(WriteFile(path, reconciler.system.read_untrusted(path)[0]), reconciler.system)
    removal.passes(f"open {address} again", removal.not_reported)
    what = f"is not detached; asked {', '.join(names)} to open it again: see `unbounded-agent status`"
    return Ending(not removal.remarks, (*recovered, f"{address} {what}", *removal.remarks))


def _fails(machine: MachineFacts, outcome: MachineOutcome) -> bool:
    """Return whether a running machine reports of its present handoff that it cannot open, or serve, all its GPUs.

    What else the host finds does not count: a machine with a foreign settings file, for example, has no handoff.
    """
    report, kinds = machine.report, (ConditionType.DEVICES_ALLOWED, ConditionType.CDI_SPEC_CURRENT)
    if machine.ended or not isinstance(report, Report) or not has_reported(machine):
        return False
    unregistered = any(each.reason in NOT_REGISTERED for each in outcome.conditions)
    return unregistered or any(each.type in kinds and each.status is Status.FALSE for each in report.conditions)
