"""What somebody changed in the machine and a run put right: told, and counted since the machine's boot."""

from agent.handoff import Repair
from agent.inside.journal import WARNING, say
from agent.inside.notes import Notes

NOTE = "repairs"


def repaired(notes: Notes, what: Repair, sentence: str) -> None:
    """Tell and count it; `sentence` names what was found."""
    say(WARNING, f"repaired: {sentence}")
    counts = repairs(notes)
    notes.save(NOTE, {**counts, what: counts[what] + 1})


def repairs(notes: Notes) -> dict[str, int]:
    """The counts of all, from 0."""
    counts = notes.load(NOTE)
    return {each.value: count if isinstance(count := counts.get(each), int) else 0 for each in Repair}
