"""Discards the agent's own state that cannot be used: logs and counts it, without ending the pass."""

import logging
import os
from collections import Counter
from collections.abc import Mapping

from agent.system.files import System

log = logging.getLogger(__name__)

_counts: Counter[str] = Counter()


def count(path: str) -> None:
    """Count it without a log message, because the caller reports it."""
    _counts[os.path.basename(path)] += 1


def discard(path: str, why: str) -> None:
    """Count and log it. The pass that finds it writes the file again."""
    count(path)
    log.warning("discarding %s: %s", path, why)


def discarded() -> Mapping[str, int]:
    """Return how many were discarded since the start of this process, by file name."""
    return dict(_counts)


def write_record(system: System, path: str, content: bytes) -> None:
    """Like `System.write`, in a directory that is ours alone: moves a directory in the file's place aside."""
    try:
        system.write(path, content)
    except IsADirectoryError:
        discard(path, f"a directory was in its place, and is now {system.put_aside(path)}")
        system.write(path, content)
