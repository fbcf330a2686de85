"""What the service knows after a pass: all pages and metrics are made from this."""

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from agent.host.daemon.http.health import Check
from agent.host.daemon.wakeups.poller import Tally
from agent.host.outcome import MachineOutcome, Outcome
from agent.model.conditions import ConditionType

PASSES = 20
"""How many passes are remembered: enough for all passes after one event, and some earlier ones."""


Fixes = Mapping[str, Mapping[ConditionType, tuple[str, ...]]]
"""Commands, or sentences, that fix the faults that conditions show; by the machine's name."""


class Pass(Struct, frozen=True):
    """One pass that has ended."""

    ended: str
    trigger: str
    seconds: float
    actions: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


class View(Struct, frozen=True):
    """The values that pages and metrics show. Times are in seconds since the epoch."""

    version: str
    machines: tuple[MachineOutcome, ...]
    """Every configured machine. One that no pass has evaluated yet has no conditions."""
    outcome: Outcome | None = None
    """The last outcome, even an old one; None before the first. Pages that must not show an old outcome get a view with
    None instead."""
    why_stale: str = ""
    """Why there is no fresh observation; empty if there is one."""
    written: float = 0.0
    """When the view was made."""
    observed: float = 0.0
    """When a pass last observed the devices of all vendors; 0 if none has."""
    config_good: bool = True
    config_loaded: float = 0.0
    """When the configuration in force was read."""
    passes: Sequence[Pass] = ()
    wakeups: tuple[Tally, ...] = ()
    notes: tuple[Check, ...] = ()
    """Further checks for /readyz?verbose that do not affect its status."""
    discarded: Mapping[str, int] = field(default_factory=dict)
    """How often the agent discarded a file of its own state, by file name."""
    fixes: Fixes = field(default_factory=dict)
    stuck: tuple[str, ...] = ()
    """The reads and commands that missed their deadline and still hang."""
