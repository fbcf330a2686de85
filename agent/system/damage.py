"""Logs and counts files of the agent's own state that it discards because it cannot use them."""

import os
from collections import Counter
from collections.abc import Mapping

from agent.system.files import System

_counts: Counter[str] = Counter()


def count(path: str) -> None:
    """Count a discarded file without a log message, because the caller reports it."""
    _counts[os.path.basename(path)] += 1


def discard(path: str, why: str) -> None:
    """Count and log a discarded file. The pass continues without its content."""
    # Imported here, because otherwise every command would load it.
    import logging

    count(path)
    logging.getLogger(__name__).warning("discarding %s: %s", path, why)


def discarded() -> Mapping[str, int]:
    """Return how many files were discarded since this process started, by file name."""
    return dict(_counts)


def write_record(system: System, path: str, content: bytes) -> None:
    """Write a file of the agent as `System.write` does. If there is a directory at `path`, move it aside first."""
    try:
        system.write(path, content)
    except IsADirectoryError:
        discard(path, f"a directory was in its place; moved it to {system.put_aside(path)}")
        system.write(path, content)
