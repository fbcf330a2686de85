"""One pass: observe facts, plan the goal, apply the difference, prove it, say so."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from agent import readiness
from agent.actions import Clearing
from agent.apply import Applied, apply
from agent.conditions import Condition, with_transitions
from agent.config import Config
from agent.errors import CommandError, DocumentError, UnsupportedError
from agent.facts import Absent, Broken, Facts, MachineFacts, Unseen
from agent.goal import MachineGoal
from agent.handoff import Repair
from agent.history import read_history, write_history
from agent.live import LiveSettings
from agent.locks import locked
from agent.node_condition import publish_judgements
from agent.observe import observe
from agent.observe.loader_cache import LoaderCache
from agent.observe.report import Report, parse_report
from agent.observe.udev import DeviceSource
from agent.paths import HOST_NVIDIA, PASS_LOCK, handoff_directory, machine_unit
from agent.plan import Plan, plan
from agent.plan.diff import Difference, Said, diff, settings_pending
from agent.stability import with_time
from agent.system.files import System

LOCK_WAIT = 10.0
"""Seconds to wait for a pass of another process."""
CLEAR_AGAIN = 600.0
"""Seconds until what could not be cleared away is tried again: an attempt may take a minute."""
BUSY = "another pass of unbounded-agent is still running"
SYSTEMD_MINIMUM = 252
"""Debian 12's: the oldest that this was tested with."""


@dataclass(frozen=True, slots=True)
class MachineOutcome:
    """One machine after a pass."""

    name: str
    conditions: tuple[Condition, ...]
    """With Ready, and with the times of the last changes."""
    gpus: tuple[str, ...] = ()
    """PCI addresses of the granted GPUs."""
    pending: bool = False
    """The latest handoff is not answered by a report yet, or Ready has to settle: look again soon."""
    stopped: bool = False
    """It exists and has settings of ours, but does not run."""
    has_run: bool = False
    """It ran in this boot, and does not any more."""
    repairs: Mapping[Repair, int] = field(default_factory=dict)
    """What its own half put right since its boot, as it reports; empty without a report."""
    starts_with: LiveSettings | None = None
    """What a start of the machine uses now; None without a goal, and while its files are not that, or not ours."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One pass."""

    facts: Facts
    machines: tuple[MachineOutcome, ...]
    actions: tuple[str, ...] = ()
    """What was done, one sentence each."""
    failures: tuple[str, ...] = ()
    """What was tried and failed, one sentence each."""
    duration: float = 0.0
    """Seconds."""
    finished: float = 0.0
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Uncleared:
    """A removal that failed."""

    tried: float
    """By CLOCK_MONOTONIC."""
    why: str


@dataclass(slots=True)
class Reconciler:
    """Brings a host to its goal.

    Only the parsed loader cache, and what could not be cleared away, are kept from one pass to the next.
    """

    config: Config
    system: System
    devices: DeviceSource
    progress: Callable[[str], None] = lambda _: None
    """Hears each step's sentence when it begins, and an empty text when a part of one is done."""
    loader_cache: LoaderCache = field(default_factory=LoaderCache)
    uncleared: dict[Clearing, Uncleared] = field(default_factory=dict)

    def look(self) -> tuple[Facts, Plan, Difference]:
        """Facts, goal and what is between them; changes nothing."""
        facts = observe(self.config, self.system, self.devices, self.loader_cache)
        self.progress("")
        if isinstance(facts.systemd_version, int) and facts.systemd_version < SYSTEMD_MINIMUM:
            raise UnsupportedError(
                f"systemd {facts.systemd_version} is too old, {SYSTEMD_MINIMUM} or newer is needed",
                "use Debian 12, Ubuntu 24.04 or newer as the host",
            )
        planned = plan(self.config, facts)
        return facts, planned, diff(planned, facts, self._said(facts, planned))

    def _said(self, facts: Facts, planned: Plan) -> Said:
        goals = {goal.name: goal for goal in planned.goal.machines}
        machines = [(each, goals[each.name], read_report(each)) for each in facts.machines if each.name in goals]
        released = [each.name for each, goal, report in machines if readiness.released(each, goal, report)]
        lacking = [each.name for each, goal, report in machines if readiness.lacks_nodes(goal, report)]
        return Said(frozenset(released), frozenset(lacking))

    def run_pass(self, *, by_hand: bool = False) -> Outcome:
        """One pass, then a start of what is stopped, never a restart. Raises AgentError when no pass is possible.

        A machine that ran in this boot was stopped by somebody: only `by_hand` starts it.
        """
        outcome = self.reconcile()
        failures = outcome.failures
        # Not under the pass's lock: the start runs prepare@, which makes a pass of its own.
        for machine in outcome.machines:
            if machine.stopped and (by_hand or not machine.has_run):
                failures += self._start(machine.name)
        return replace(outcome, failures=failures)

    def reconcile(self, lock_wait: float = LOCK_WAIT) -> Outcome:
        """Bring files to the goal and judge the result. Raises AgentError when that is not possible at all."""
        started = time.monotonic()
        with locked(self.system, PASS_LOCK, lock_wait, BUSY):
            facts, planned, difference = self.look()
            applied = self._apply(planned, difference)
            if applied.done:
                facts, planned, difference = self.look()
            machines = self.judge(facts, planned, difference)
            write_history(self.system, {machine.name: machine.conditions for machine in machines})
            wanted = {machine.name: machine.conditions[-1] for machine in machines if self._on_node(machine.name)}
            unpublished = publish_judgements(self.system, wanted, time.time())
        problems = tuple(each.why for each in self.uncleared.values())
        return Outcome(
            facts=replace(facts, problems=(*facts.problems, *problems)),
            machines=machines,
            actions=tuple(action.describe() for action in applied.done),
            failures=applied.failures + unpublished,
            duration=time.monotonic() - started,
            finished=time.time(),
        )

    def judge(self, facts: Facts, planned: Plan, difference: Difference) -> tuple[MachineOutcome, ...]:
        """The conditions of every configured machine."""
        history, now = read_history(self.system), time.time()
        goals = {goal.name: goal for goal in planned.goal.machines}
        machines = []
        for machine in sorted(facts.machines, key=lambda each: each.name):
            if machine.name not in self.config.machines:
                continue
            goal = goals.get(machine.name)
            if goal is None:
                outcome = MachineOutcome(machine.name, self._without_goal(machine, facts, planned))
            else:
                outcome = self._judge(machine, goal, facts, difference)
            before = history.get(machine.name, ())
            conditions = with_transitions(with_time(outcome.conditions, before, now), before, now)
            settling = conditions[-1].reason == "Settling"
            machines.append(replace(outcome, conditions=conditions, pending=outcome.pending or settling))
        return tuple(machines)

    def _without_goal(self, machine: MachineFacts, facts: Facts, planned: Plan) -> tuple[Condition, ...]:
        if machine.name in planned.held:
            return readiness.held(machine, planned.held[machine.name])
        return readiness.without_gpus(self.config.machines[machine.name], facts)

    def _judge(self, machine: MachineFacts, goal: MachineGoal, facts: Facts, difference: Difference) -> MachineOutcome:
        report, refused = read_report(machine), difference.refused.get(machine.name, "")
        return MachineOutcome(
            name=machine.name,
            conditions=readiness.evaluate(self.config.machines[machine.name], goal, facts, report, refused),
            gpus=tuple(address for grant in goal.grants for address in grant.gpus),
            pending=not refused and readiness.pending(machine, goal, report),
            stopped=not refused and machine.unit_state in ("inactive", "failed"),
            has_run=machine.has_run,
            repairs=report.repairs if isinstance(report, Report) else {},
            starts_with=None if refused or settings_pending(goal, difference) else goal.live,
        )

    def _start(self, name: str) -> tuple[str, ...]:
        self.progress(f"start machine {name}")
        try:
            self.system.run("systemctl", "start", "--no-block", machine_unit(name))
        except CommandError as error:
            return (str(error),)
        return ()

    def _on_node(self, name: str) -> bool:
        return self.config.machines[name].node_condition

    def _apply(self, planned: Plan, difference: Difference) -> Applied:
        if planned.goal.machines:
            # A Bind= whose source is missing stops the machine from booting.
            self.system.make_directory(HOST_NVIDIA)
        for machine in planned.goal.machines:
            self.system.make_directory(handoff_directory(machine.name))
        now = time.monotonic()
        wanted = [(action, each) for action, each in self.uncleared.items() if action in difference.actions]
        waiting = {action: each for action, each in wanted if now - each.tried < CLEAR_AGAIN}
        due = [action for action in difference.actions if action not in tuple(waiting)]
        applied = apply(due, self.system, self.progress)
        self.uncleared = waiting | {action: Uncleared(now, why) for action, why in applied.uncleared.items()}
        return applied


def read_report(machine: MachineFacts) -> Report | Absent | Broken | Unseen:
    """The machine's report, if it has its form."""
    if isinstance(machine.report, Absent | Broken | Unseen):
        return machine.report
    try:
        return parse_report(machine.report)
    except DocumentError as error:
        return Broken(str(error))
