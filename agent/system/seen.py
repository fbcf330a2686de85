"""Turns failed observations into facts (Absent, Broken or Unseen), or treats a missing directory as an empty one."""

from collections.abc import Callable
from typing import TypeVar

from agent.model.facts import Absent, Broken, Unseen
from agent.system.errnos import NOT_FOUND, UNUSABLE
from agent.system.files import System

T = TypeVar("T")


def read_seen(read: Callable[[str], T], path: str) -> T | Absent | Broken | Unseen:
    """Return what `read` returns for the path, or the fact that its OSError stands for."""
    try:
        return read(path)
    except OSError as error:
        return classify_error(path, error)


def classify_error(path: str, error: OSError) -> Absent | Broken | Unseen:
    """Return the fact that an OSError at a path stands for."""
    if error.errno in NOT_FOUND:
        return Absent(f"{path}: no such file")
    if error.errno in UNUSABLE:
        return Broken(f"{path}: {error.strerror}")
    return Unseen(f"{path}: {error.strerror or error}")


def entries_if_present(system: System, directory: str) -> tuple[str, ...]:
    """Return the sorted names in a directory; none if there is no such directory. Raises OSError."""
    try:
        return system.entries(directory)
    except (FileNotFoundError, NotADirectoryError):
        return ()
