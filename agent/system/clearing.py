"""Removes trees in a process of its own, which can be stopped at its time limit (agent.system.removal)."""

import sys

from agent.model.errors import ApplyError, ExitCodeError
from agent.system import removal
from agent.system.files import System

DOOR = (sys.executable, "-IS", removal.__file__)
"""The program that removes trees. Its arguments are their paths."""
CHECK_LIMIT = 30.0
"""Seconds to read the list of mounts."""


def clear(paths: tuple[str, ...], system: System, limit: float) -> None:
    """Remove trees that a machine may have filled. Raises AgentError, for example if it takes over `limit` seconds."""
    _run(paths, system, limit)


def refuse_mounts(path: str, system: System) -> None:
    """Raise ApplyError if anything is mounted at the path or below it, so that it cannot be removed."""
    _run(("--check", path), system, CHECK_LIMIT)


def _run(arguments: tuple[str, ...], system: System, limit: float) -> None:
    try:
        system.run(*DOOR, *arguments, timeout=limit)
    except ExitCodeError as error:
        # The program's own messages say what to do.
        again = "correct this, then run the same command again" if error.status == removal.MOUNTED else ""
        raise ApplyError(error.stderr.strip().replace("\n", "; "), again) from error
