"""`unbounded-agent gpus detach`: takes a GPU out of use, so that it can be removed.

This command and `attach` make their own passes, whether or not the service runs, because the service's sandbox hides
what other processes have open.
"""

import argparse
import time
from collections.abc import Callable, Iterable

from msgspec import Struct, field

from agent.cli.granted_gpus import device_numbers, granted_to, may_open
from agent.cli.holders import describe, find_gpu, gpu_nodes, no_holder, users, why_unknown
from agent.cli.printing import say
from agent.cli.wiring import reconciler_for
from agent.config.settings import MachineSettings
from agent.host.observe.machine_report import Report, read_report
from agent.host.outcome import Outcome
from agent.host.reconcile import Reconciler
from agent.host.state.detached_gpus import forget_detached, observe_detached, record_detached, record_tainted
from agent.host.state.locks import detach_lock, pass_lock
from agent.host.verify.answers import STALE_AFTER, names_handoff
from agent.model.errors import AgentError
from agent.model.facts import DeviceNode, Gpu, MachineFacts
from agent.model.granted import Granted
from agent.model.handoff import DRA
from agent.model.text import restart_command
from agent.system.files import System
from agent.system.open_files import Held

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


def run_detach(options: argparse.Namespace) -> int:
    """Run `gpus detach` with these options."""
    return print_ending(detach(options.address, reconciler_for(options)))


def print_ending(ending: Ending) -> int:
    """Print the sentences, and return the exit code."""
    say(ending.sentences)
    return 0 if ending.done else 1


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
        found = gpu.pci_address in observe_detached(reconciler.system).tainted
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
            self._record_detached(draining=True)
            self.passes(f"remove {address} from its CDI specification", self.not_reported)
            if held := self._drain(left if policy == "drain-wait" else 0):
                return self._still_used(policy, seconds, held)
        self._record_detached(draining=False)
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
        self._record(lambda system, address: record_tainted(system, address, evict=evict))
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
        if address not in observe_detached(self.reconciler.system).tainted:
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

    def _record_detached(self, *, draining: bool) -> None:
        self._record(lambda system, address: record_detached(system, address, draining=draining))

    def _record(self, record: Callable[[System, str], bool]) -> None:
        with pass_lock(self.reconciler.system, self.reconciler.progress):
            if self.recorded:
                self._require_record()
            if not record(self.reconciler.system, self.gpu.pci_address):
                raise AgentError(f"{self.gpu.pci_address} has left the PCI bus in the meantime")
            self.recorded = True

    def _require_record(self) -> None:
        """Raises AgentError if the GPU is no longer recorded: this command must not undo what somebody else did."""
        if self.gpu.pci_address not in observe_detached(self.reconciler.system).tainted:
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
    report = read_report(machine)
    granted = machine.granted
    if not isinstance(report, Report) or not isinstance(granted, Granted):
        return False
    return names_handoff(report, machine, granted.generation)
