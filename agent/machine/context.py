"""The context that is passed to all steps of a run."""

from dataclasses import dataclass

from agent.machine.notes import Notes, Owned
from agent.model.handoff import Handoff
from agent.system.files import System


@dataclass(frozen=True, slots=True)
class Context:
    """The machine, the agent's notes and files in it, and the handoff, which says what the host wants."""

    system: System
    notes: Notes
    owned: Owned
    handoff: Handoff
    generation: str
    """The handoff's generation, a digest of its content. It is computed only once."""

    @classmethod
    def of(cls, system: System, handoff: Handoff) -> "Context":
        return cls(system, Notes(system), Owned(system), handoff, handoff.generation)
