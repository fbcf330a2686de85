"""Discards files of the agent's own state that cannot be used. They are logged and counted; the pass continues."""

import logging
import os
from collections import Counter
from collections.abc import Mapping

from agent.system.files import System

log = logging.getLogger(__name__)

_counts: Counter[str] = Counter()


def count(path: str) -> None:
    """Count a discarded file without a log message, because the caller reports it."""
    _counts[os.path.basename(path)] += 1


def discard(path: str, why: str) -> None:
    """Count and log a discarded file. The same pass writes it again."""
    count(path)
    log.warning("discarding %s: %s", path, why)


def discarded() -> Mapping[str, int]:
    """Return how many files were discarded since this process started, by file name."""
    return dict(_counts)


def write_record(system: System, path: str, content: bytes) -> None:
    """Write a file as `System.write` does, in a directory of the agent. A directory in its place is moved aside."""
    try:
        system.write(path, content)
    except IsADirectoryError:
        discard(path, f"a directory was in its place; moved it to {system.put_aside(path)}")
        system.write(path, content)
