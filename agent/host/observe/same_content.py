"""Finds driver roots whose files differ from the host's only in their times, as after a package was reinstalled.

The agent compares the content once. If the content is the same, the agent records the new times.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pydantic import ConfigDict

from agent.host.state.record import Record
from agent.model.facts import Library, StagedRoot, VendorFacts
from agent.model.paths import TREES, times_file
from agent.system.deadlines import call_device
from agent.system.files import System

LIMIT = 30.0
"""Seconds to compare one driver, which may be a GB on a slow disk. A driver that takes longer counts as different."""
CHUNK = 1 << 20
_different: set[int] = set()
"""Hashes of comparisons that found a difference: passes need not repeat them while staging keeps failing."""


@dataclass(frozen=True)
class _Times:
    __pydantic_config__ = ConfigDict(extra="forbid")

    of: str
    mtimes: dict[str, int]


_TIMES = Record(_Times)


def with_times(
    roots: Iterable[StagedRoot], vendors: Iterable[VendorFacts], system: System
) -> tuple[tuple[StagedRoot, ...], dict[str, bytes]]:
    """Return the roots, with the host's times if they have the host's content, and the records to write, by path."""
    noted = {root: _noted(root, system) for root in roots}
    notes: dict[str, bytes] = {}
    for vendor in vendors:
        user_space = vendor.driver.user_space if vendor.driver else None
        if user_space is None or not isinstance(user_space.files, tuple):
            continue
        files, version = tuple(sorted(user_space.files)), user_space.version
        ours = [root for root in noted if (root.vendor, root.version) == (vendor.vendor, version)]
        if any(noted[root].files == files for root in ours):
            continue
        for root in sorted(ours, reverse=True):
            if _same(noted[root], files, system):
                noted[root] = replace(root, files=files)
                mtimes = {file.target: file.mtime_ns for file in files if not file.link}
                notes[times_file(root.index)] = _TIMES.render(_Times(_digest(root), mtimes))
                break
    return tuple(sorted(noted.values())), notes


def _digest(root: StagedRoot) -> str:
    """Return a digest that identifies the manifest, because a later root may get the same index."""
    return hashlib.sha256(repr((root.version, root.files)).encode()).hexdigest()


def _noted(root: StagedRoot, system: System) -> StagedRoot:
    """Return the root with its recorded times. An unusable record costs no more than one comparison."""
    times = _TIMES.read_seen(times_file(root.index), system)
    if isinstance(times, _Times) and times.of == _digest(root):
        return replace(root, files=_at(root.files, times.mtimes))
    return root


def _at(files: Iterable[Library], mtimes: Mapping[str, int]) -> tuple[Library, ...]:
    return tuple(replace(file, mtime_ns=mtimes.get(file.target, file.mtime_ns)) for file in files)


def _same(root: StagedRoot, files: tuple[Library, ...], system: System) -> bool:
    """Return whether the root has the same files as the host, except for their times."""
    if tuple(sorted(_at(root.files, {file.target: file.mtime_ns for file in files}))) != files:
        return False
    before = {file.target: file.mtime_ns for file in root.files}
    # Files with a rewritten text need no further comparison: their text was compared above.
    renewed = [file for file in files if file.mtime_ns != before[file.target] and not file.text]
    comparison = hash((system.root, root, files))
    if comparison in _different:
        return False
    what = f"the content of driver root {root.index}"
    try:
        same = call_device(what, lambda: all(_same_file(root.index, file, system) for file in renewed), LIMIT)
    except OSError:
        # The comparison took too long, or a file was replaced or removed meanwhile, which the next pass observes.
        same = False
    if not same:
        _different.add(comparison)
    return same


def _same_file(index: int, file: Library, system: System) -> bool:
    with (
        system.open_public(file.source) as source,
        # The published copy is not used, because machines can change it if it is a plain directory. A root that was
        # published as a plain directory has no files in TREES, and counts as different.
        system.open_public(f"{TREES}/{index}/{file.target}") as copy,
    ):
        now = os.fstat(source.fileno())
        if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
            return False
        while content := source.read(CHUNK):
            if copy.read(CHUNK) != content:
                return False
        return not copy.read(1)
