"""Logs and counts files of the agent's own state that it discards because it cannot use them."""

import os
from collections import Counter
from collections.abc import Mapping

from agent.model.device import FileIdentity
from agent.system.files import System

_counts: Counter[str] = Counter()
_known: dict[str, FileIdentity | None] = {}
"""The damaged files that were counted already: by path, the identity that the file had then; None if it was unknown.
Some of these files stay until the agent writes new ones."""


def count(path: str, system: System) -> bool:
    """Count a discarded file without a log message, because the caller reports it.

    While the same file stays, later calls do not count it again. Return whether this call has counted the file.
    """
    place = system.full_path(path)
    try:
        identity = system.identity(path, follow=False)
    except OSError:
        identity = None
    if place in _known and _known[place] == identity:
        return False
    _known[place] = identity
    _counts[os.path.basename(path)] += 1
    return True


def discard(path: str, why: str, system: System) -> None:
    """Count and log a discarded file, but only once while the same file stays. The pass goes on without its content."""
    if count(path, system):
        _warn(path, why)


def discarded() -> Mapping[str, int]:
    """Return how many files were discarded since this process started, by file name."""
    return dict(_counts)


def write_record(system: System, path: str, content: bytes, mode: int = 0o644) -> None:
    """Write a file of the agent as `System.write` does. If there is a directory at `path`, move it aside first."""
    if system.is_directory(path):
        _counts[os.path.basename(path)] += 1
        _warn(path, f"a directory was in its place; moved it to {system.put_aside(path)}")
    system.write(path, content, mode)


def _warn(path: str, why: str) -> None:
    # Imported here, because otherwise every command would load it.
    import logging

    logging.getLogger(__name__).warning("discarding %s: %s", path, why)
