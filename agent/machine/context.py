"""What every step of a run works with."""

from dataclasses import dataclass

from agent.machine.notes import Notes, Owned
from agent.model.handoff import Handoff
from agent.system.files import System


@dataclass(frozen=True, slots=True)
class Context:
    """The machine, what the agent has noted and owns there, and what the host wants of it."""

    system: System
    notes: Notes
    owned: Owned
    handoff: Handoff
    generation: str
    """The handoff's, a digest of its content, computed once."""

    @classmethod
    def of(cls, system: System, handoff: Handoff) -> "Context":
        return cls(system, Notes(system), Owned(system), handoff, handoff.generation)
