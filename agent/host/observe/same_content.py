"""Finds driver roots whose files have the same content as the host's files, but other times of modification.

That happens after a reinstallation of the driver: without this module, the whole driver would be staged again.

The agent compares the content once. If the content is the same, the agent records the new times.
"""

import os
from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from agent.host.state.record import Record
from agent.model.digest import sha256
from agent.model.driver_root import Library, StagedRoot
from agent.model.facts import VendorFacts
from agent.model.paths import TREES, times_file
from agent.system.deadlines import call_device
from agent.system.files import System

LIMIT = 30.0
"""Seconds to compare one driver, which may be a GB on a slow disk. A driver that takes longer counts as different."""
CHUNK = 1 << 20
"""Bytes to compare at a time."""
_different: set[int] = set()
"""Hashes of comparisons that found a difference, failed or took too long. Without them, if the driver cannot be staged,
each pass would repeat the comparison."""


class _Times(Struct, frozen=True):
    of: str
    """The digest of the manifest to which the times belong."""
    mtimes: dict[str, int]
    """The host's times in nanoseconds, by the file's path in the driver root."""


_TIMES = Record(_Times)


def with_times(
    roots: Iterable[StagedRoot], vendors: Iterable[VendorFacts], system: System
) -> tuple[tuple[StagedRoot, ...], dict[str, bytes]]:
    """Return the roots, and by path the records of modification times that must be written.

    Roots whose files have the same content as the host's get the times of the host's files.
    """
    current = {root: _with_recorded_times(root, system) for root in roots}
    records: dict[str, bytes] = {}
    for vendor in vendors:
        user_space = vendor.driver.user_space if vendor.driver else None
        if user_space is None or not isinstance(user_space.files, tuple):
            continue
        files, version = tuple(sorted(user_space.files)), user_space.version
        candidates = [root for root in current if (root.vendor, root.version) == (vendor.vendor, version)]
        if any(current[root].files == files for root in candidates):
            continue
        for root in sorted(candidates, reverse=True):
            if _same_content(current[root], files, system):
                current[root] = replace(root, files=files)
                mtimes = {file.target: file.mtime_ns for file in files if not file.link}
                records[times_file(root.index)] = _TIMES.render(_Times(_digest(root), mtimes))
                break
    return tuple(sorted(current.values())), records


def _digest(root: StagedRoot) -> str:
    """Return a digest that identifies the manifest. The index does not: a later root may get the same index."""
    return sha256(repr((root.version, root.files)).encode())


def _with_recorded_times(root: StagedRoot, system: System) -> StagedRoot:
    """Return the root with its recorded times. An unusable record is ignored: it costs only one more comparison."""
    times = _TIMES.read_seen(times_file(root.index), system)
    if isinstance(times, _Times) and times.of == _digest(root):
        return replace(root, files=_with_mtimes(root.files, times.mtimes))
    return root


def _with_mtimes(files: Iterable[Library], mtimes: Mapping[str, int]) -> tuple[Library, ...]:
    return tuple(replace(file, mtime_ns=mtimes.get(file.target, file.mtime_ns)) for file in files)


def _same_content(root: StagedRoot, files: tuple[Library, ...], system: System) -> bool:
    """Return whether the root has the same files as the host, except for their times."""
    if tuple(sorted(_with_mtimes(root.files, {file.target: file.mtime_ns for file in files}))) != files:
        return False
    before = {file.target: file.mtime_ns for file in root.files}
    # A file whose text the agent rewrites has its text in `files`, and the check above has compared it already.
    touched = [file for file in files if file.mtime_ns != before[file.target] and not file.text]
    comparison = hash((system.root, root, files))
    if comparison in _different:
        return False
    what = f"the content of driver root {root.index}"
    try:
        same = call_device(what, lambda: all(_same_file(root.index, file, system) for file in touched), LIMIT)
    except OSError:
        # The comparison took too long, or a file was replaced or removed meanwhile. The next pass observes the change.
        same = False
    if not same:
        _different.add(comparison)
    return same


def _same_file(index: int, file: Library, system: System) -> bool:
    with (
        system.open_public(file.source) as source,
        # Read the copy in TREES, not in the published root: if that is a plain directory, machines can change it. A
        # root that is a plain directory has no files in TREES, so opening one fails and the root counts as different.
        system.open_public(f"{TREES}/{index}/{file.target}") as copy,
    ):
        now = os.fstat(source.fileno())
        if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
            return False
        while content := source.read(CHUNK):
            if copy.read(CHUNK) != content:
                return False
        return not copy.read(1)
