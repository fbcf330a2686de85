"""What a pass came to, for commands, logs, metrics and pages. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.model.actions import Done
from agent.model.conditions import Condition, ConditionType, unknown
from agent.model.facts import Facts
from agent.model.faults import Fault
from agent.model.handoff import Repair
from agent.model.live import LiveSettings
from agent.model.reasons import Reason


@dataclass(frozen=True, slots=True)
class MachineOutcome:
    """One machine after a pass."""

    name: str
    conditions: tuple[Condition, ...]
    """All, Ready last, with the times of the last changes; none before the machine's first pass."""
    gpus: tuple[str, ...] = ()
    """PCI addresses of the granted GPUs."""
    pending: bool = False
    """No report answers the latest handoff yet, or Ready has to settle: make another pass soon."""
    stopped: bool = False
    """It exists and we may write its settings, but it does not run."""
    startable: bool = False
    """Our settings are in place, from this pass or an earlier one, and systemd has read its drop-in."""
    has_run: bool = False
    """It ran in this boot of the host, and no longer runs."""
    lost: tuple[str, ...] = ()
    """PCI addresses of its lost GPUs, except acknowledged ones."""
    repairs: Mapping[Repair, int] = field(default_factory=dict)
    """Repairs by the machine half since the machine's boot, from its report; empty without a report."""
    starts_with: LiveSettings | None = None
    """What a start would use now; None without a goal, and while its files differ from the goal or are not ours."""
    fault: Fault | None = None
    """An unexpected error while working on this machine."""

    def condition(self, kind: ConditionType) -> Condition:
        """The condition of that type; Unknown before the machine's first pass."""
        found = next((each for each in self.conditions if each.type is kind), None)
        return found or unknown(kind, Reason.NOT_EVALUATED, "this condition was not evaluated")

    @property
    def ready(self) -> Condition:
        """The condition that sums up all others."""
        return self.condition(ConditionType.READY)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One pass."""

    facts: Facts
    machines: tuple[MachineOutcome, ...]
    actions: tuple[Done, ...] = ()
    failures: tuple[str, ...] = ()
    """Attempts that failed, one sentence each."""
    duration: float = 0.0
    """Seconds."""
    finished: float = 0.0
    """Seconds since the epoch."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The actions as sentences."""
        return tuple(action.sentence for action in self.actions)
