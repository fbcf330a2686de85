"""Logs and counts the repairs of what others changed in the machine, since the machine's boot."""

import contextlib

from agent.machine.journal import WARNING, say
from agent.machine.notes import Notes
from agent.model.handoff import Repair

NOTE = "repairs"


def repaired(notes: Notes, what: Repair, sentence: str) -> None:
    """Log and count a repair; `sentence` says what was found."""
    say(WARNING, f"repaired: {sentence}")
    # If the count cannot be written, the repair still stands.
    with contextlib.suppress(OSError):
        counts = _counts(notes)
        notes.save(NOTE, {**counts, what: counts[what] + 1})


def repairs(notes: Notes) -> dict[str, int]:
    """Return all counts, 0 if they cannot be read: the report must still be written."""
    try:
        return _counts(notes)
    except OSError:
        return {each.value: 0 for each in Repair}


def _counts(notes: Notes) -> dict[str, int]:
    counts = notes.load(NOTE)
    return {each.value: count if isinstance(count := counts.get(each), int) else 0 for each in Repair}
