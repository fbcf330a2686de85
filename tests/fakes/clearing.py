"""Runs the program that removes trees on files of a simulated host."""

import contextlib
import io

from agent.system import removal
from agent.system.copy import DOOR
from agent.system.process import Completed


def clears(argv: tuple[str, ...]) -> bool:
    """Return whether this command removes trees, or asks whether they can be removed."""
    return argv[: len(DOOR)] == DOOR


def clear_below(tree: object, argv: tuple[str, ...]) -> Completed:
    """Run the program below the directory `tree`, in this process."""
    below = [f"{tree}{word}" if word.startswith("/") else word for word in argv[len(DOOR) :]]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        status = removal.main(below)
    return Completed(status, b"", stderr.getvalue().encode())
