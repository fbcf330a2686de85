"""Turns an unexpected error in the work for one machine into a fact, so that other machines are not affected. Pure."""

from agent.model.facts import Unseen
from agent.model.text import one_line

SHOWN = 200
"""Characters of an error that messages show; the log has the traceback."""


class Fault(Unseen, frozen=True):
    """An unexpected error, which users neither cause nor fix: a bug, possibly triggered by a hostile machine."""

    error: Exception


def fault(work: str, error: Exception) -> Fault:
    """Return an unexpected error as a fact. `work` completes the sentence "cannot ..."."""
    return Fault(f"cannot {work}: {in_words(error)}", error)


def in_words(error: BaseException) -> str:
    """Return the error with its type, without which many Python errors say little."""
    return f"{type(error).__name__}: {one_line(str(error))[:SHOWN]}"
