"""Finds who uses a GPU, takes it from its machines so that it can be removed, and gives it back.

`gpus detach` and `attach` make their own passes, whether or not the service runs, because the service's sandbox hides
what other processes have open.
"""

import time
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar

from msgspec import Struct, field

from agent.host.apply.steps import publish_documents, write_file
from agent.host.plan.goal import Plan, remembered_files
from agent.host.plan.nspawn import node_by_number
from agent.host.reconcile import Outcome, Reconciler
from agent.host.state.gpus import (
    Resetting,
    forget_detached,
    forget_fault,
    observe_gpus,
    record_detached,
    record_tainted,
)
from agent.host.state.locks import detach_lock, pass_lock
from agent.host.vendors import host_vendor
from agent.host.verify.answers import STALE_AFTER, names_handoff
from agent.host.verify.gpu_states import health
from agent.model.conditions import ConditionType, Reason, Status
from agent.model.device import as_in_sysfs
from agent.model.errors import AgentError, ConfigError
from agent.model.facts import (
    THE_GPU,
    Absent,
    Broken,
    DeviceNode,
    Facts,
    Gpu,
    Granted,
    MachineFacts,
    Remembered,
    RememberedGpu,
    Unseen,
)
from agent.model.goal import WriteFile
from agent.model.handoff import DRA, Report
from agent.model.paths import WAKE, gpu_test_file, granted_file, handoff_file
from agent.model.text import restart_command
from agent.system.files import System
from agent.system.processes import Held, find_holders
from agent.system.trust import write_record

T = TypeVar("T", Gpu, RememberedGpu)

UNSEEN_SHOWN = 10
"""At most this many processes that could not be inspected are listed; the others are only counted."""
POLICIES = ("refuse", "drain-wait", "force")
"""Values of the setting on_detach, the most careful first."""
NOT_REGISTERED = (Reason.FABRIC_REGISTERING, Reason.FABRIC_NOT_REGISTERED, Reason.FABRIC_FAILED)
"""Reasons of FabricReady that rest on what GPUs say. A reset may have changed it."""


def holders(address: str, reconciler: Reconciler) -> tuple[str, ...]:
    """Return lines about the users of the GPU at `address`; if `address` is empty, about the users of each GPU."""
    facts = reconciler.preview()[0]
    lines: list[str] = []
    for gpu in [find_gpu(address, facts)] if address else _known(facts).values():
        nodes = gpu_nodes(facts, gpu.pci_address)
        held, unknown = users(reconciler.system, nodes), why_unknown(gpu, nodes)
        described = describe(held, gpu) if held or unknown else (no_holder(held), *describe(held, gpu))
        lines += [f"{gpu.pci_address}: {line}" for line in (*described, unknown) if line]
    return tuple(lines) or ("this host has no GPU",)


def find_gpu(address: str, facts: Facts) -> Gpu:
    """Return the GPU with this PCI address or UUID.

    Raises ConfigError if there is none, and AgentError if a vendor's devices cannot be listed.
    """
    known = _known(facts)
    found = _named(address, known.values())
    if found is None:
        raise ConfigError(
            f"{address!a}: no GPU has this PCI address or UUID", f"GPUs here: {', '.join(sorted(known)) or 'none'}"
        )
    return found


def _named(word: str, gpus: Iterable[T]) -> T | None:
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
    """Return a line per process, with how to release the GPU.

    Of the processes that cannot be inspected, list at most UNSEEN_SHOWN, because a pod may have many.
    """
    advise, lines = host_vendor(gpu.vendor).release_advice, []
    for each in held.holders:
        advice = advise(each.command, gpu.pci_address, in_machine=bool(each.machine))
        lines.append(f"{each.describe()}; to release it: {advice}" if advice else each.describe())
    more = len(held.unseen) - UNSEEN_SHOWN
    return (*lines, *held.unseen[:UNSEEN_SHOWN], *((f"and {more} more cannot be inspected",) if more > 0 else ()))


def granted_to(address: str, facts: Facts, planned: Plan, configured: Container[str]) -> tuple[str, ...]:
    """Return the machines that have the GPU, would have it if it were not detached, or may still open it.

    Raises AgentError if a machine may run, or start, with the GPU, and its settings cannot be changed now.
    """
    nodes = gpu_nodes(facts, address)
    for machine in facts.machines:
        # If a configured machine has ended, its settings can still be changed: they are written before its next start.
        cannot_change = machine.name in planned.held and not (machine.stays_ended and machine.name in configured)
        unknown = machine.live_unseen or not isinstance(machine.granted, Granted | Absent)
        if cannot_change and (unknown or address in machine.kept_gpus or may_open(machine, nodes)):
            raise AgentError(f"cannot change machine {machine.name}: {planned.held[machine.name]}")
    # A machine that may still open the GPU counts too, even if it has been granted another GPU instead.
    permitted = {machine.name for machine in facts.machines if may_open(machine, nodes)}
    return tuple(
        sorted(
            machine.name
            for machine in planned.goal.machines
            if machine.name in permitted or any(address in (*grant.gpus, *grant.detached) for grant in machine.grants)
        )
    )


def may_open(machine: MachineFacts, nodes: Iterable[DeviceNode]) -> bool:
    """Return whether the machine is known to be permitted to open one of the nodes."""
    devices = {node_by_number(node.number) for node in nodes}
    return machine.live is not None and any(entry.node in devices for entry in machine.live.allow)


def forget(address: str, reconciler: Reconciler) -> tuple[str, ...]:
    """Forget the lost GPU at this address. Without an address, forget all lost GPUs, and acknowledge a damaged record.

    Return lines that say what was forgotten. Raises ConfigError if no lost GPU has the address, and AgentError
    if the record cannot be read.
    """
    with pass_lock(reconciler.system, reconciler.progress):
        remembered = _remembered(reconciler)
        lost = _lost(address, remembered)
        damage = remembered.damage if address else ""
        gpus = tuple(gpu for gpu in remembered.gpus if gpu.pci_address not in lost)
        for file in remembered_files(Remembered(gpus, damage)):
            write_record(reconciler.system, file.path, file.content)
        if gpus != remembered.gpus or damage != remembered.damage:
            # Wake the service: its metrics and the machines' Node objects show the loss until its next pass.
            with suppress(OSError):
                reconciler.system.write(WAKE, b"")
    lines = [
        f"{gpu.describe()} is forgotten, and no longer missing in: {', '.join(gpu.machines)}" for gpu in lost.values()
    ]
    if remembered.damage != damage:
        lines.append("the damage to the record is acknowledged: the agent remembers GPUs again from now on")
    return tuple(lines) or ("no GPU is lost: nothing to do",)


def lost(address: str, reconciler: Reconciler) -> tuple[Mapping[str, RememberedGpu], str]:
    """Return what `forget` would forget: lost GPUs by their addresses, and the damage to the record. Raises as it."""
    remembered = _remembered(reconciler)
    return _lost(address, remembered), "" if address else remembered.damage


def _remembered(reconciler: Reconciler) -> Remembered:
    # Take the GPUs from a plan, not from the record: if the service is not running, the record may be out of date.
    remembered = reconciler.preview()[1].goal.remembered
    if isinstance(remembered, Absent | Broken | Unseen):
        raise AgentError(remembered.why, "make this record of granted GPUs readable, then run the command again")
    return remembered


def _lost(address: str, remembered: Remembered) -> dict[str, RememberedGpu]:
    lost = {gpu.pci_address: gpu for gpu in remembered.gpus if gpu.lost}
    if not address:
        return lost
    gpu = _named(address, lost.values())
    if gpu is None:
        hint = f"lost GPUs: {', '.join(lost)}" if lost else "no GPU is lost"
        raise ConfigError(f"{address!a}: no lost GPU has this PCI address or UUID", hint)
    return {gpu.pci_address: gpu}


class Timing(Struct, frozen=True):
    """Intervals and limits, in seconds."""

    poll: float = 1.0
    answer: float = STALE_AFTER + 60.0
    """Limit for the machines' reports. By then, the host has withdrawn the permission even from a machine that reports
    nothing."""
    taint: float = 5.0
    """Time from a taint until no scheduler allocates the GPU. agent.dra and the API server need about one second."""
    eviction: float = 90.0
    """Limit for evicted pods to end. By default, a pod is killed 30 seconds after SIGTERM."""


class Ending(Struct, frozen=True):
    """The result of `gpus detach` or `attach`, in sentences."""

    done: bool
    sentences: tuple[str, ...]


def detach(address: str, reconciler: Reconciler, timing: Timing = Timing()) -> Ending:
    """Take the GPU out of use. Raises ConfigError for an unknown address, or another AgentError.

    Keep new pods from the GPU, wait until its users have exited, then withdraw the machines' permission. If the GPU is
    in use, on_detach decides: `drain-wait` waits, `refuse` gives up, and `force` withdraws the permission nevertheless.
    The result is `done` if no machine may open the GPU, and no process that can be inspected has it open.
    """
    facts, planned, _ = reconciler.preview()
    gpu = find_gpu(address, facts)
    configured, nodes = reconciler.config.machines, gpu_nodes(facts, gpu.pci_address)
    machines = granted_to(gpu.pci_address, facts, planned, configured)
    if unknown := why_unknown(gpu, nodes):
        return Ending(False, (f"{gpu.pci_address} was not detached: {unknown}",))
    # The most careful policy of the GPU's machines, and their longest drain_wait.
    policy = min((configured[name].on_detach for name in machines), key=POLICIES.index, default="refuse")
    seconds = max((configured[name].drain_wait for name in machines), default=0)
    with detach_lock(reconciler.system, gpu.pci_address):
        removal = Removal(gpu, machines, reconciler, timing, nodes)
        removal.found = removal.is_recorded()
        if policy == "refuse" and (held := removal.check()):
            return removal.in_use("is in use; nothing was changed (on_detach is refuse)", held)
        try:
            return removal.run(policy, seconds)
        except BaseException:
            removal.clean_up(policy)
            raise


class Removal(Struct):
    """Takes one GPU from its machines, or gives it back to them."""

    gpu: Gpu
    machines: tuple[str, ...]
    """Machines that have the GPU, would have it if it were not detached, or may still open it."""
    reconciler: Reconciler
    timing: Timing
    nodes: tuple[DeviceNode, ...] = ()
    found: bool = False
    """Whether the GPU was already recorded as detached or tainted. If so, this command must not undo that record."""
    remarks: list[str] = field(default_factory=list)
    """What went wrong, one sentence each."""
    recorded: bool = False
    """Whether this command has recorded the GPU as detached or tainted, and has not undone that."""
    purpose: str = "remove"
    """What somebody will do with the GPU, as a verb."""
    waited: bool = False
    """Whether the GPU has been tainted for so long that no new pod gets it."""
    ignored: frozenset[str] = frozenset()
    """Programs on the host, by their names in /proc/PID/comm, that may have the GPU open all the same."""

    def run(self, policy: str, seconds: int) -> Ending:
        """Withdraw the GPU step by step."""
        address, left = self.gpu.pci_address, seconds
        if self._offered(self.machines):
            # First only taint the GPU. It stays in the CDI specification, so that containers of its pods can restart.
            started, limits = time.monotonic(), {"refuse": 0, "drain-wait": seconds, "force": self.timing.eviction}
            self.record(partial(record_tainted, evict=policy == "force"))
            outcome = self.reconciler.reconcile()
            if not self.waited and self._offered(machine.name for machine in self._running(outcome)):
                self.reconciler.progress(f"waiting {self.timing.taint:.0f} s until no new pod gets {address}")
                time.sleep(self.timing.taint)
            held = self._drain(limits[policy])
            if held and policy != "force":
                return self._still_used(policy, seconds, held)
            left = max(0, seconds - int(time.monotonic() - started))
        if policy != "force":
            self.record(partial(record_detached, draining=True))
            self.passes(f"remove {address} from its CDI specification", self.not_reported)
            if held := self._drain(left if policy == "drain-wait" else 0):
                return self._still_used(policy, seconds, held)
        self.record(partial(record_detached, draining=False))
        outcome = self.passes(f"release {address}", self._permitted)
        permitted = (*self._permitted(outcome), *self._without_record(outcome))
        if held := self.check():
            what = f"is no longer granted to any machine, but is still in use: do not {self.purpose} it yet"
            return self.in_use(what, held)
        self._require_record()
        if permitted:
            still = f"do not {self.purpose} {address} yet: {', '.join(permitted)} can still open it"
            return Ending(False, (still, *self.remarks))
        until = f"until it has left the PCI bus, or `unbounded-agent gpus attach {address}` gives it back"
        what = f"{address} may be removed: {no_holder(held)}; no machine gets it {until}"
        return Ending(True, (what, *describe(held, self.gpu), *self.remarks))

    def _still_used(self, policy: str, seconds: int, held: Held) -> Ending:
        if policy == "refuse" and not self.found:
            self.attach_again()
            return self.in_use("was opened in the meantime, and is granted as before (on_detach is refuse)", held)
        waited = "" if policy == "refuse" else f" after {seconds} s"
        what = f"is withheld from new pods, but is still in use{waited}"
        attach = f"`unbounded-agent gpus attach {self.gpu.pci_address}`"
        return self.in_use(f"{what}; repeat this command to keep waiting, or run {attach} to give it back", held)

    def in_use(self, what: str, held: Held) -> Ending:
        """Return the result for a GPU that processes have open."""
        return Ending(False, (f"{self.gpu.pci_address} {what}", *describe(held, self.gpu), *self.remarks))

    def _offered(self, names: Iterable[str]) -> bool:
        """Return whether one of the machines offers its GPUs by DRA, which can keep new pods from a single GPU."""
        return any(self.reconciler.config.machines[name].allocation == DRA for name in names)

    def attach_again(self) -> Outcome:
        """Forget that the GPU is detached, and wait until the machines have it again."""
        self._forget()
        return self.passes(f"get {self.gpu.pci_address} back", self.not_reported)

    def _forget(self) -> None:
        with pass_lock(self.reconciler.system, self.reconciler.progress):
            forget_detached(self.reconciler.system, self.gpu.pci_address)
        self.recorded = False

    def clean_up(self, policy: str) -> None:
        """After an error, undo the detachment, or report that the GPU stays detached.

        The detachment is undone only under policy `refuse`, and only if this command made it.
        """
        address, progress = self.gpu.pci_address, self.reconciler.progress
        if not self.is_recorded():
            return
        if policy == "refuse" and not self.found:
            try:
                self._forget()
            except (AgentError, OSError) as error:
                progress(f"{address} could not be given back: {error}")
            else:
                progress(f"{address} is no longer detached: the next pass grants it as before")
                return
        progress(f"{address} is still detached; `unbounded-agent gpus attach {address}` gives it back")

    def check(self) -> Held:
        """Return the processes that have the GPU open now."""
        self.reconciler.progress(f"checking which processes have {self.gpu.pci_address} open")
        return self._users()

    def _users(self) -> Held:
        held = users(self.reconciler.system, self.nodes)
        return held._replace(holders=tuple(e for e in held.holders if e.machine or e.command not in self.ignored))

    def _drain(self, seconds: float) -> Held:
        """Wait until no process has the GPU open, or time is up. Return the processes that still have it open."""

        def look() -> tuple[Held, str]:
            self._require_record()
            held = self._users()
            lines = describe(held, self.gpu) if held else ()
            return held, f"waiting up to {seconds:.0f} s for {'; for '.join(lines)}" if lines else ""

        return self.reconciler.wait(look, seconds, self.timing.poll)

    def record(self, record: Callable[[System, str], bool]) -> None:
        """Change what is recorded of the GPU. Raises AgentError if it is gone, or if somebody undid the last change."""
        with pass_lock(self.reconciler.system, self.reconciler.progress):
            if self.recorded:
                self._require_record()
            if not record(self.reconciler.system, self.gpu.pci_address):
                raise AgentError(f"{self.gpu.pci_address} has left the PCI bus in the meantime")
            self.recorded = True

    def is_recorded(self) -> bool:
        """Return whether the GPU is recorded as detached or tainted."""
        return self.gpu.pci_address in observe_gpus(self.reconciler.system).tainted

    def _require_record(self) -> None:
        """Raises AgentError if the GPU is no longer recorded: this command must not undo what somebody else did."""
        if not self.is_recorded():
            raise AgentError(f"{self.gpu.pci_address} was attached, or left the PCI bus, in the meantime")

    def passes(self, what: str, waiting: Callable[[Outcome], list[str]]) -> Outcome:
        """Make passes until `waiting` returns no machine, or time is up. Return the last outcome. Raises AgentError.

        Adds to the remarks: failures of the machines in the last pass, late machines, and machines without a record.
        """

        def look() -> tuple[tuple[Outcome, list[str]], str]:
            if self.recorded:
                self._require_record()
            outcome = self.reconciler.reconcile()
            names = waiting(outcome)
            return (outcome, names), f"waiting for {', '.join(names)} to {what}" if names else ""

        outcome, names = self.reconciler.wait(look, self.timing.answer, self.timing.poll)
        self.remarks += outcome.failures_of(self.machines)
        self.remarks += [f"machine {name} did not {what}: see `unbounded-agent status`" for name in names]
        self.remarks += [
            f"machine {name} was started without this agent's settings, or the record of its devices is lost: "
            f"only {restart_command(name)} withdraws the GPU"
            for name in self._without_record(outcome)
        ]
        return outcome

    def _running(self, outcome: Outcome) -> list[MachineFacts]:
        return [each for each in outcome.facts.machines if each.name in self.machines and not each.ended]

    def not_reported(self, outcome: Outcome) -> list[str]:
        """Return the running machines that have not reported on their present handoff."""
        return [machine.name for machine in self._running(outcome) if not _has_reported(machine)]

    def _permitted(self, outcome: Outcome) -> list[str]:
        """Return the machines that may still open the GPU."""
        return [each.name for each in self._running(outcome) if may_open(each, self.nodes)]

    def _without_record(self, outcome: Outcome) -> list[str]:
        """Return the running machines whose devices cannot be withdrawn, because no record lists their devices."""
        return [machine.name for machine in self._running(outcome) if machine.live is None]


def _has_reported(machine: MachineFacts) -> bool:
    report, granted = machine.report, machine.granted
    if not isinstance(report, Report) or not isinstance(granted, Granted):
        return False
    return names_handoff(report, machine, granted.generation)


def attach(address: str, reconciler: Reconciler, timing: Timing = Timing()) -> Ending:
    """Undo a detachment, forget the GPU's last fatal error, and wait until the machines have the GPU.

    If the GPU is not detached, running machines that have it and fail to open a GPU try again at once: nothing else
    tells them of a reset. Raises ConfigError for an unknown address, or another AgentError.
    """
    facts, planned, _ = reconciler.preview()
    gpu = find_gpu(address, facts)
    address, system = gpu.pci_address, reconciler.system
    remarks: tuple[str, ...] = ()
    if resetting := observe_gpus(system).resetting.get(address):
        with detach_lock(system, address):
            tool = host_vendor(gpu.vendor).reset
            held = users(system, gpu_nodes(facts, address)).holders
            if tool and any(each.command == tool.program and not each.machine for each in held):
                raise AgentError(f"{address} is still being reset", f"wait until {tool.program} has ended")
            remarks = restore(gpu, resetting, system)
    # The administrator knows that the GPU works again.
    with pass_lock(system, reconciler.progress):
        shared = [each for each, fault in facts.gpus.faults.items() if fault.vendor == gpu.vendor]
        forgotten = [forget_fault(system, each) for each in (address, *shared)]
        had_error = any(forgotten) or health(gpu, facts).source == THE_GPU
    recovered: tuple[str, ...] = ()
    if had_error:
        also = (f"so is the error of {each}, which concerned all GPUs of {gpu.vendor}" for each in shared)
        recovered = (f"{address} counts as healthy again: its last fatal error is forgotten", *also)
    tainted = facts.gpus.tainted.get(address)
    if tainted and tainted.testing:
        # A killed `gpus test` has left its request: a machine may still be working on it.
        for failure in publish_documents(system, gpu_test_file, {}, [each.name for each in facts.machines]):
            reconciler.progress(failure)
    if gpu.detached or address in facts.gpus.tainted:
        machines = granted_to(address, facts, planned, reconciler.config.machines)
        removal = Removal(gpu, machines, reconciler, timing, remarks=[*remarks])
        outcome = removal.attach_again()
        have = ", ".join(machine.name for machine in outcome.machines if address in machine.gpus)
        what = f"was given back to {have}" if have else "is no longer detached; no machine's settings ask for it"
        return Ending(not removal.remarks, (f"{address} {what}", *recovered, *removal.remarks))
    outcome = reconciler.reconcile()
    reasons = {each.name: {c.reason for c in each.conditions} for each in outcome.machines if address in each.gpus}
    names = tuple(each.name for each in outcome.facts.machines if _fails(each, reasons.get(each.name)))
    if not names:
        return Ending(True, recovered or (f"{address} is not detached: nothing to do",))
    removal = Removal(gpu, names, reconciler, timing)
    with pass_lock(system, reconciler.progress):
        # As in agent.host.plan.diff, the record comes first: its time shows when the handoff was last published.
        for path in (file(name) for name in names for file in (granted_file, handoff_file)):
            write_file(WriteFile(path, system.read_untrusted(path)[0]), system)
    removal.passes(f"open {address} again", removal.not_reported)
    what = f"is not detached; asked {', '.join(names)} to open it again: see `unbounded-agent status`"
    return Ending(not removal.remarks, (*recovered, f"{address} {what}", *removal.remarks))


def restore(gpu: Gpu, resetting: Resetting, system: System) -> tuple[str, ...]:
    """Let the driver keep a GPU initialised as it did before its reset. Return what went wrong, in sentences."""
    by_tool = host_vendor(gpu.vendor).reset
    if not by_tool or not resetting.restore:
        return ()
    try:
        by_tool.restore(system, gpu.pci_address)
    except AgentError as error:
        return (f"the driver does not keep {gpu.pci_address} initialised as before: {error}",)
    return ()


def _fails(machine: MachineFacts, reasons: set[str] | None) -> bool:
    """Return whether a running machine reports of its present handoff that it cannot open, or serve, all its GPUs.

    `reasons` are those of its conditions; None if it does not have the GPU. What else the host finds does not count: a
    machine with a foreign settings file, for example, has no handoff.
    """
    report, kinds = machine.report, (ConditionType.DEVICES_ALLOWED, ConditionType.CDI_SPEC_CURRENT)
    if reasons is None or machine.ended or not isinstance(report, Report) or not _has_reported(machine):
        return False
    failed = any(each.type in kinds and each.status is Status.FALSE for each in report.conditions)
    return failed or not reasons.isdisjoint(NOT_REGISTERED)
