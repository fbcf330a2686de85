"""How a failed look is told from an absent thing: the one place that sorts errno values."""

import errno
from collections.abc import Callable
from typing import TypeVar

from agent.facts import Absent, Broken, Unseen

T = TypeVar("T")

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO})
"""ENODEV: a sysfs or procfs file whose device went between open(2) and read(2)."""
UNUSABLE = frozenset({errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.EISDIR})
"""There, but of another type or size than it must be."""


def look(read: Callable[[str], T], path: str) -> T | Absent | Broken | Unseen:
    """What `read` gives for the path, or why not."""
    try:
        return read(path)
    except OSError as error:
        return why_not(path, error)


def why_not(path: str, error: OSError) -> Absent | Broken | Unseen:
    """A failed look at a path, as a fact."""
    if error.errno in NOT_THERE:
        return Absent(f"{path}: there is no such file")
    if error.errno in UNUSABLE:
        return Broken(f"{path}: {error.strerror}")
    return Unseen(f"{path}: {error.strerror or error}")
