"""Keeps an unexpected error in one machine's work from affecting other machines. Pure."""

from dataclasses import dataclass

from agent.model.facts import Unseen
from agent.model.text import one_line

SHOWN = 200
"""Characters of the error that messages show; the log has the traceback."""


@dataclass(frozen=True, slots=True)
class Fault(Unseen):
    """An error that users neither cause nor fix: a bug, possibly exploited by a hostile machine."""

    error: Exception


def fault(work: str, error: Exception) -> Fault:
    """Log an unexpected error and return it as a fact. `work`: what the agent was doing for the machine."""
    return Fault(f"cannot {work}: {in_words(error)}", error)


def in_words(error: BaseException) -> str:
    """Return the error with its type: many Python errors say little without it."""
    return f"{type(error).__name__}: {one_line(str(error))[:SHOWN]}"
