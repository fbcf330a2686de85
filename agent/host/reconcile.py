"""Makes a pass: observes facts, plans the goal, applies the difference, verifies and reports the result."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from agent.config.load import InForce
from agent.config.settings import Config
from agent.host.apply.steps import Applied, apply, publish_documents, publish_host_status, remove_used_tokens
from agent.host.observe.host import Memory, observe
from agent.host.plan.diff import Difference, changes_left, diff, settings_pending, startable
from agent.host.plan.driver_roots import without_plain
from agent.host.plan.goal import Plan, plan, with_live
from agent.host.plan.live_devices import Acknowledged
from agent.host.state.gpus import record_current, record_fault, record_recovered
from agent.host.state.locks import pass_lock
from agent.host.state.records import (
    clear_report,
    has_started,
    machines_with_state,
    mark_starts,
    read_history,
    write_ages,
    write_history,
)
from agent.host.verify import answers
from agent.host.verify.gpu_states import fenced_gpus, gpu_states, own_fault, recovered_at, withheld
from agent.host.verify.readiness import Case, conditions, expected_gpus, lost_gpus
from agent.model.conditions import Condition, ConditionType, Reason, Status, unknown, with_transitions
from agent.model.contract import (
    FencedGpu,
    HealthQuestions,
    render_gpu_states,
    render_health_questions,
    render_host_status,
)
from agent.model.errors import AgentError, CommandError
from agent.model.facts import Broken, Facts, LiveSettings
from agent.model.goal import Cleanup, Done, Fault, RemoveDriverRoot, RemoveStaleStaging, fault
from agent.model.handoff import DRA, Report
from agent.model.paths import (
    HOST_NVIDIA,
    fabric_file,
    gpu_health_file,
    gpu_states_file,
    handoff_directory,
    machine_unit,
    report_directory,
)
from agent.system.devices import DeviceSource
from agent.system.files import System

# The result of a pass, for commands, logs, metrics and pages. Pure.


NO_MACHINES = "no machine is configured"
"""What commands and pages show instead of outcomes."""
NO_ANSWER = "it does not run, or has not answered the latest handoff yet"


class MachineOutcome(Struct, frozen=True):
    """One machine after a pass."""

    name: str
    conditions: tuple[Condition, ...]
    """All conditions with the times of their last changes, Ready last; empty before the machine's first pass."""
    gpus: tuple[str, ...] = ()
    """PCI addresses of the granted GPUs that are not lost. If the machine has no goal, it keeps the GPUs that it was
    granted last, and these are meant."""
    pending: bool = False
    """Another pass is needed soon, for one of these reasons: the machine was just started; its report does not answer
    the latest handoff yet; the next pass will change its devices or publish its handoff; in its report, a condition
    that Ready needs is Unknown; Ready has not settled yet."""
    stopped: bool = False
    """The machine exists and the agent may write its settings, but the machine neither runs nor starts. Its unit is not
    masked."""
    startable: bool = False
    """The agent's settings for the machine are on disk, from this or an earlier pass, and systemd has read them."""
    has_run: bool = False
    """The machine does not run now, and one of these is true: since the host booted, it has stopped, failed to start,
    or had a start cancelled; or its unit is masked."""
    expected: int = 0
    """How many GPUs the settings ask for. If they ask for all: the number of GPUs that the machine has or has lost."""
    advertised: int | None = None
    """How many of the granted GPUs the node offers to pods, according to the machine; None if that is unknown."""
    agent_version: str = ""
    """The machine half's version, from its report; empty without a report."""
    reported: float = 0.0
    """When the machine half last reported, in seconds since the epoch; 0 without a report."""
    lost: tuple[str, ...] = ()
    """PCI addresses of the machine's lost GPUs, except acknowledged ones."""
    repairs: Mapping[str, int] = field(default_factory=dict)
    """Repairs by the machine half since the machine's boot, from its report; empty without a report."""
    start_settings: LiveSettings | None = None
    """The settings that a start would use now; None if those on disk are not the goal's, or if there is no goal."""
    fault: Fault | None = None
    """An unexpected error while working on this machine."""

    def condition(self, kind: ConditionType) -> Condition:
        """Return the condition of this type; Unknown before the machine's first pass."""
        found = next((each for each in self.conditions if each.type is kind), None)
        return found or unknown(kind, Reason.NOT_EVALUATED, "this condition was not evaluated")

    @property
    def ready(self) -> Condition:
        """The condition that sums up all others."""
        return self.condition(ConditionType.READY)

    @property
    def awaited(self) -> str:
        """What the machine still needs, in words, for a command that waits for the machine.

        If Ready is not True, the text is Ready's message. If Ready is True, the text is the message of the first
        needed condition that is not True, or NO_ANSWER if there is none. Only a machine
        without a GPU can be Ready and have such a condition.
        """
        needed = (each for each in self.conditions if each.needed_for_ready)
        missing = next((each.message for each in needed if each.status is not Status.TRUE), NO_ANSWER)
        return missing if self.ready.status is Status.TRUE else self.ready.message


def granted_to(machines: Iterable[MachineOutcome]) -> Mapping[str, tuple[str, ...]]:
    """Return the names of the machines that have each GPU, by the GPU's PCI address."""
    granted: dict[str, tuple[str, ...]] = {}
    for machine in machines:
        for address in machine.gpus:
            granted[address] = (*granted.get(address, ()), machine.name)
    return granted


def started_and_stopped(name: str) -> str:
    """Return the sentence about a machine that was started and no longer runs."""
    return f"machine {name} started and then stopped: see `journalctl -e -u {machine_unit(name)}`"


class Outcome(Struct, frozen=True):
    """The result of one pass."""

    facts: Facts
    machines: tuple[MachineOutcome, ...]
    actions: tuple[Done, ...] = ()
    failures: tuple[str, ...] = ()
    """Steps that failed and unexpected errors, one sentence each."""
    concerned: Mapping[str, Collection[str]] = field(default_factory=dict)
    """The names of the machines for each failure that concerns only some, by the failure's sentence. All other failures
    may concern any machine."""
    finished: float = 0.0
    """When the pass ended, in seconds since the epoch."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The actions as sentences."""
        return tuple(action.sentence for action in self.actions)

    def failures_of(self, machines: Iterable[str]) -> tuple[str, ...]:
        """Return the failures, without those that concern only other machines."""
        names, concerned = set(machines), self.concerned
        return tuple(each for each in self.failures if each not in concerned or names.intersection(concerned[each]))


CLEANUP_INTERVALS: Mapping[type[Cleanup], float] = {RemoveDriverRoot: 600.0, RemoveStaleStaging: 60.0}
"""Seconds between a failed attempt at a removal and the next one. An attempt may take a minute, and a second."""
SYSTEMD_MINIMUM = 252
"""Debian 12's version, the oldest tested."""


T = TypeVar("T")


class Reconciler(Struct):
    """Brings a host to its goal.

    Between passes, a Reconciler keeps only its memory of observations, the removals that failed, and the faults that it
    logged.
    """

    config: Config
    system: System
    devices: DeviceSource
    progress: Callable[[str], None] = lambda _: None
    """Called with a sentence when a step or a wait begins. An empty text only means that the pass still goes on."""
    rejected: str = ""
    """What is wrong with the configuration files, if the last good configuration is in force; otherwise empty."""
    in_force: InForce | None = None
    """Checks that no other process has changed the configuration; None if `config` is not from CONFIG_FILE."""
    wait_until: float = math.inf
    """The time, by CLOCK_MONOTONIC, after which a pass no longer waits until another process's pass ends."""
    memory: Memory = field(default_factory=Memory)
    failed_cleanups: dict[Cleanup, tuple[float, str]] = field(default_factory=dict)
    """Removals that failed: when they are tried again, by CLOCK_MONOTONIC, and why they failed."""
    logged_faults: tuple[str, ...] = ()
    """The faults of the last pass, one sentence each. Their tracebacks are in the log already."""

    def wait(self, look: Callable[[], tuple[T, str]], seconds: float, poll: float = 1.0) -> T:
        """Call `look` again and again, until there is nothing to wait for, or time is up. Return its last result.

        `look` returns a result, and in words what is waited for: an empty text if nothing is. New words are reported.
        """
        deadline, said = time.monotonic() + seconds, ""
        while True:
            result, awaited = look()
            if not awaited or time.monotonic() >= deadline:
                return result
            if awaited != said:
                self.progress(awaited)
                said = awaited
            time.sleep(poll)

    def preview(self) -> tuple[Facts, Plan, Difference]:
        """Return facts, plan and difference without changing anything. Raises AgentError if no pass is possible."""
        facts = without_plain(observe(self.config, self.system, self.devices, self.memory))
        self.progress("")
        if isinstance(facts.systemd_version, int) and facts.systemd_version < SYSTEMD_MINIMUM:
            raise AgentError(
                f"systemd {facts.systemd_version} is too old: the agent needs {SYSTEMD_MINIMUM} or newer",
                "use Debian 12, Ubuntu 24.04 or newer as the host",
            )
        return self.planned(facts)

    def planned(self, facts: Facts) -> tuple[Facts, Plan, Difference]:
        """Return the plan for these facts, and the difference, with the facts as they are completed by the plan."""
        planned = plan(self.config, facts, time.time())
        facts, faults = with_live(planned, facts)
        planned = replace(planned, faults={**planned.faults, **faults})
        return facts, planned, diff(planned, facts, self._acknowledged(facts, planned))

    def _acknowledged(self, facts: Facts, planned: Plan) -> Acknowledged:
        """Return what the machines' reports confirm. An unexpected error becomes a fault of the machine."""
        goals, now = {goal.name: goal for goal in planned.goal.machines}, time.monotonic()
        released, missing_nodes, forbidden, faults = set(), set(), set(), {}
        for machine in (each for each in facts.machines if each.name in goals):
            goal, report = goals[machine.name], machine.report
            try:
                if isinstance(report, Fault):
                    faults[machine.name], report = report, Broken(report.why)
                released |= {machine.name} if answers.released(machine, goal, report, now) else set()
                missing_nodes |= {machine.name} if answers.reports(Reason.WRONG_NODE, goal, report) else set()
                forbidden |= {machine.name} if answers.reports(Reason.NOT_PERMITTED, goal, report) else set()
            except Exception as error:
                faults[machine.name] = broken = fault("use its report", error)
                # Treat the report as malformed, so that an error here does not keep permissions in force.
                released |= {machine.name} if answers.released(machine, goal, Broken(broken.why), now) else set()
        return Acknowledged(released, missing_nodes, forbidden, faults, now)

    def run_pass(self, *, by_hand: Collection[str] = ()) -> Outcome:
        """Make one pass, then start machines that are not running. Raises AgentError if no pass is possible.

        A machine that has run since the host booted is started only if `by_hand` names it: a user may have stopped it.
        """
        outcome = self.reconcile()
        failures, machines = outcome.failures, list[MachineOutcome]()
        # Machines start only after `reconcile` has released the pass lock, because a start runs prepare@, which makes a
        # pass itself.
        for machine in outcome.machines:
            wanted = machine.name in by_hand
            may_start = machine.stopped and machine.startable and (wanted or not machine.has_run)
            # Read the machine's mark (agent.host.state.records) again: `stop` may have made it during the pass.
            if may_start and (wanted or not has_started(machine.name, self.system)):
                failures += self.start(machine.name)
                machine = replace(machine, pending=True)
            machines.append(machine)
        return replace(outcome, machines=tuple(machines), failures=failures)

    def reconcile(self) -> Outcome:
        """Make one pass without starting machines, and return its outcome.

        Raises AgentError if no pass is possible. One of these errors is ConfigChangedError: another process has changed
        the configuration, so a pass with the old one would undo what that process did.
        """
        with pass_lock(self.system, self.progress, self.wait_until):
            if self.in_force:
                self.in_force.check()
            with_state, not_listed = machines_with_state(self.system)
            facts, planned, difference = self.preview()
            answered, not_recorded = self._record_answers(facts)
            if answered:
                facts, planned, difference = self.preview()
            # Taint GPUs before they are withdrawn: a new pod must not get one. Ignore failures here, because the second
            # call below tries again and reports them.
            published = not self._publish_documents(facts, planned, with_state)
            applied = self._apply(facts, planned, difference)
            if applied.done or applied.failures:
                facts, planned, difference = self.preview()
            machines = self.evaluate(facts, planned, difference)
            failures = applied.failures + write_history(self.system, {each.name: each.conditions for each in machines})
            write_ages(self.system, self.memory.ages)
            statuses = dict[str, bytes]()
            for each in machines:
                settings, fenced = self.config.machines[each.name], self.cordons_for(each, facts)
                if settings.node_condition or fenced:
                    others = [each.condition(ConditionType.GPUS_TESTED)] if settings.test_gpus else []
                    statuses[each.name] = render_host_status(
                        each.ready, time.time(), others, node_condition=settings.node_condition, fenced=fenced
                    )
            failures += not_listed + not_recorded + publish_host_status(self.system, statuses, with_state)
            nodes = [name for name, settings in sorted(self.config.machines.items()) if settings.node]
            failures += remove_used_tokens(nodes, self.system)
            if applied.done or applied.failures or not published:
                failures += self._publish_documents(facts, planned, with_state)
        problems, faults = tuple(why for _, why in self.failed_cleanups.values()), self._log_faults(machines)
        return Outcome(
            facts=replace(facts, problems=(*facts.problems, *problems)),
            machines=machines,
            actions=tuple(Done(action.kind, action.describe()) for action in applied.done),
            failures=(*failures, *faults),
            concerned={**applied.concerned, **faults},
            finished=time.time(),
        )

    def _record_answers(self, facts: Facts) -> tuple[bool, tuple[str, ...]]:
        """Record errors that GPUs name themselves, and their recovery. Return whether there was any, and failures."""
        changed, failures = False, []
        try:
            if facts.gpus.outdated:
                record_current(self.system)
        except (OSError, AgentError) as error:
            failures.append(f"cannot bring the record of GPUs up to date: {error}")
        for gpu in (gpu for vendor in facts.vendors for gpu in vendor.gpus):
            try:
                if fault := own_fault(gpu, facts):
                    changed |= record_fault(self.system, gpu.pci_address, fault)
                elif said := recovered_at(gpu, facts):
                    changed |= record_recovered(self.system, gpu.pci_address, said)
            except (OSError, AgentError) as error:
                failures.append(f"cannot record what {gpu.pci_address} says of its health: {error}")
        return changed, tuple(failures)

    def evaluate(self, facts: Facts, planned: Plan, difference: Difference) -> tuple[MachineOutcome, ...]:
        """Return the outcome of every configured machine, with its conditions."""
        history, now = read_history(self.system), time.time()
        goals = {goal.name: goal for goal in planned.goal.machines}
        machines = []
        for machine in sorted(facts.machines, key=lambda each: each.name):
            name = machine.name
            if name not in self.config.machines:
                continue
            faulted, refused = difference.faults.get(name), difference.refused.get(name, "")
            case = Case(
                self.config.machines[name],
                machine,
                facts,
                goal=None if faulted else goals.get(name),
                refused=refused,
                held=planned.held.get(name, ""),
                fault=faulted.why if faulted else "",
                rejected=self.rejected,
                remembered=planned.goal.remembered,
                previous=history.get(name, ()),
                now=now,
            )
            try:
                outcome = _outcome(case, difference)
            except Exception as error:
                faulted = fault("evaluate its conditions", error)
                unknowns = (unknown(kind, Reason.INTERNAL_ERROR, faulted.why) for kind in ConditionType)
                outcome = MachineOutcome(name, with_transitions(unknowns, (), now), machine.kept_gpus)
            lost = tuple(gpu.pci_address for gpu in lost_gpus(name, case.remembered))
            gpus = tuple(address for address in outcome.gpus if address not in lost)
            expected = expected_gpus(case.settings.gpus, (*gpus, *lost))
            outcome = replace(outcome, gpus=gpus, lost=lost, expected=expected, fault=faulted)
            machines.append(replace(outcome, startable=startable(machine, facts)))
        return tuple(machines)

    def cordons_for(self, machine: MachineOutcome, facts: Facts) -> tuple[FencedGpu, ...]:
        """Return the GPUs for which the machine cordons its Node, unless its device plugin has withdrawn them."""
        settings = self.config.machines[machine.name]
        if settings.allocation == DRA or not settings.cordon_node:
            return ()
        return fenced_gpus(machine.gpus, facts, machine.name)

    def _log_faults(self, machines: tuple[MachineOutcome, ...]) -> dict[str, tuple[str, ...]]:
        """Return the names of machines with a fault, by the sentence about the fault. Log tracebacks of new faults."""
        faults = {each.name: each.fault for each in machines if each.fault}
        sentences = {name: f"machine {name}: {each.why}" for name, each in faults.items()}
        new = {name: sentence for name, sentence in sentences.items() if sentence not in self.logged_faults}
        if new:
            import logging  # Here, because otherwise every command would load it.

            for name, sentence in new.items():
                logging.getLogger(__name__).error("%s", sentence, exc_info=faults[name].error)
        self.logged_faults = tuple(sentences.values())
        return {sentence: (name,) for name, sentence in sentences.items()}

    def start(self, name: str) -> tuple[str, ...]:
        """Start a machine, without waiting until it runs. Return failures, one sentence each.

        The caller must not hold the pass lock: before the machine's unit, systemd starts prepare@, which makes a pass.
        """
        self.progress(f"start machine {name}")
        clear_report(self.system, name)
        try:
            self.system.run("systemctl", "start", "--no-block", machine_unit(name))
        except CommandError as error:
            return (str(error),)
        return ()

    def _publish_documents(self, facts: Facts, planned: Plan, with_state: Collection[str]) -> tuple[str, ...]:
        """Publish the states of GPUs, what their fabric depends on, and what to ask them about their health.

        What could not be observed is no change.
        """
        states, fabric, questions = dict[str, bytes](), dict[str, bytes](), dict[str, bytes]()
        held, interval = set(planned.held), self.config.gpu_health.interval
        unseen = {goal.name for goal in planned.goal.machines if any(each.fabric_cause is None for each in goal.grants)}
        for goal in planned.goal.machines:
            settings = self.config.machines[goal.name]
            if settings.allocation == DRA:
                found = gpu_states(goal, facts, planned.goal.remembered, settings.share_gpus, settings.test_gpus)
                states[goal.name] = render_gpu_states(found)
            if causes := [each.fabric_cause for each in goal.grants if each.fabric_cause]:
                fabric[goal.name] = "; ".join(causes).encode()
            if interval and (gpus := [gpu for grant in goal.grants for gpu in grant.gpus]):
                found_withheld = withheld(gpus, facts)
                questions[goal.name] = render_health_questions(HealthQuestions(interval, found_withheld))
        failures = publish_documents(self.system, gpu_states_file, states, with_state, held)
        failures += publish_documents(self.system, gpu_health_file, questions, with_state, held)
        return failures + publish_documents(self.system, fabric_file, fabric, with_state, held | unseen)

    def _apply(self, facts: Facts, planned: Plan, difference: Difference) -> Applied:
        """Make the directories of machines, then perform the steps, except removals that failed recently."""
        failures, concerned, names = [], dict[str, Collection[str]](), [each.name for each in planned.goal.machines]
        # Before each start, the machine's unit makes the same directories, and mounts a file system on the one for
        # reports.
        directories = {make(name): name for name in names for make in (handoff_directory, report_directory)}
        for directory in [HOST_NVIDIA, *directories] if names else []:
            try:
                self.system.make_directory(directory)
            except OSError as error:
                failures.append(f"cannot create {directory}: {error.strerror}")
                concerned |= {failures[-1]: (directories[directory],)} if directory in directories else {}
        mark_starts(facts.machines, self.system)
        now = time.monotonic()
        postponed = {
            action: (again, why)
            for action, (again, why) in self.failed_cleanups.items()
            if action in difference.actions and now < again
        }
        # Search a tuple: a search in the dict would hash each action, and actions of some types cannot be hashed.
        due = [action for action in difference.actions if action not in tuple(postponed)]
        applied = apply(due, self.system, self.progress)
        failed = {each: (now + CLEANUP_INTERVALS[type(each)], why) for each, why in applied.failed_cleanups.items()}
        self.failed_cleanups = postponed | failed
        return replace(applied, failures=(*failures, *applied.failures), concerned=concerned | applied.concerned)


def _outcome(case: Case, difference: Difference) -> MachineOutcome:
    """Return the machine's conditions, and what its goal and its report say."""
    found, machine, goal = conditions(case), case.machine, case.goal
    settling = found[-1].reason == Reason.SETTLING
    if goal is None:
        # Unless it is held, a machine without a goal has no GPU: its record is left from an earlier grant.
        kept = machine.kept_gpus if case.fault or case.held else ()
        return MachineOutcome(machine.name, found, kept, pending=settling)
    report, written = machine.report if isinstance(machine.report, Report) else None, not case.refused
    waits = machine.starts or answers.pending(machine, goal, machine.report) or changes_left(goal, difference)
    return MachineOutcome(
        name=machine.name,
        conditions=found,
        gpus=tuple(address for grant in goal.grants for address in grant.gpus),
        pending=settling or (written and waits),
        # False while a start is queued. Somebody may stop the machine meanwhile, which cancels the queued start: a
        # second start by the agent would undo that stop.
        stopped=written and machine.stays_ended and not machine.masked,
        has_run=machine.has_run,
        repairs=report.repairs if report else {},
        advertised=report.advertised_gpus if report else None,
        agent_version=report.agent_version if report else "",
        reported=case.now - machine.report_age if report else 0.0,
        start_settings=goal.live if written and not settings_pending(goal, difference) else None,
    )
