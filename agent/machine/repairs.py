"""Logs and counts repairs: changes that somebody made in the machine, and that the agent has undone."""

import contextlib

from agent.machine.notes import Notes
from agent.model.handoff import Repair
from agent.system.journal import WARNING, say

NOTE = "repairs"


def record_repair(notes: Notes, repair: Repair, problem: str) -> None:
    """Log and count a repair. `problem` says what was wrong."""
    say(WARNING, f"repaired: {problem}")
    # A count that cannot be written does not matter.
    with contextlib.suppress(OSError):
        counts = _counts(notes)
        notes.save(NOTE, {**counts, repair: counts[repair] + 1})


def repair_counts(notes: Notes) -> dict[str, int]:
    """Return the counts since the machine's boot; all 0 if they cannot be read, because the report must be written."""
    try:
        return _counts(notes)
    except OSError:
        return {each.value: 0 for each in Repair}


def _counts(notes: Notes) -> dict[str, int]:
    counts = notes.load(NOTE)
    return {each.value: counts.get(each, 0) for each in Repair}
