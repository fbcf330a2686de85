"""The result of a pass, for commands, logs, metrics and pages. Pure."""

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from agent.model.actions import Done
from agent.model.conditions import Condition, ConditionType, Status, unknown
from agent.model.facts import Facts
from agent.model.faults import Fault
from agent.model.handoff import Repair
from agent.model.live import LiveSettings
from agent.model.reasons import Reason

NO_MACHINES = "no machine is configured"
"""What commands and pages show instead of outcomes."""
NO_METRICS = "no metrics: "
"""Begins the service's line in `systemctl status` while it cannot serve its pages. The reason follows."""
PASS_FAILED = "the last pass failed: "
"""Begins the service's line if its last pass did not finish. The reason follows."""
STEP_FAILED = "the last pass had a failure: "
"""Begins the service's line if its last pass finished, but a step failed. The first failure follows."""
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
    repairs: Mapping[Repair, int] = field(default_factory=dict)
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


class Outcome(Struct, frozen=True):
    """The result of one pass."""

    facts: Facts
    machines: tuple[MachineOutcome, ...]
    actions: tuple[Done, ...] = ()
    failures: tuple[str, ...] = ()
    """Steps that failed and unexpected errors, one sentence each."""
    concerned: Mapping[str, str] = field(default_factory=dict)
    """The machine's name for each failure that concerns only one machine, by the failure's sentence. All other failures
    may concern any machine."""
    duration: float = 0.0
    """Seconds that the pass took."""
    finished: float = 0.0
    """When the pass ended, in seconds since the epoch."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The actions as sentences."""
        return tuple(action.sentence for action in self.actions)

    def failures_of(self, machines: Iterable[str]) -> tuple[str, ...]:
        """Return the failures, without those that concern only other machines."""
        may_concern = {None, *machines}
        return tuple(each for each in self.failures if self.concerned.get(each) in may_concern)
