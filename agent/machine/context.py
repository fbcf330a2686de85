"""The context that is passed to all steps that settle one handoff."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from agent.machine.notes import Notes, Owned
from agent.model.handoff import Handoff
from agent.system.files import System

T = TypeVar("T")


class Once:
    """Results that are computed once and used by several steps, some of which run in threads."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._results: dict[str, Any] = {}

    def get(self, name: str, compute: Callable[[], T]) -> T:
        """Return the result with this name. The first caller computes it; if `compute` raises, the next one does."""
        # A lock for each name: who waits for one result must not wait for another.
        with self._locks.setdefault(name, threading.Lock()):
            if name not in self._results:
                self._results[name] = compute()
            result: T = self._results[name]
            return result


class Context(NamedTuple):
    """The machine, the agent's notes and files in it, and the handoff, which says what the host wants."""

    system: System
    notes: Notes
    owned: Owned
    handoff: Handoff
    generation: str
    """The handoff's generation, a digest of its content. It is computed only once."""
    once: Once
    """Results that are computed only once for this handoff."""
    unsynced: list[str]
    """Files that a crash of the kernel may still damage. They are synced only after the report has been written,
    because the report must not wait for that."""

    @classmethod
    def of(cls, system: System, handoff: Handoff) -> "Context":
        return cls(system, Notes(system), Owned(system), handoff, handoff.generation, Once(), [])
