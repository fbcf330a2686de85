"""Observes which driver roots are complete, and which of them machines see.

Reads the files in driver roots only to find out whether they still have the content of the host's files.
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from agent.host.state.records import Record, parse_manifest
from agent.model.errors import DocumentError
from agent.model.facts import Library, StagedRoot, Unseen, VendorFacts
from agent.model.paths import HOST_NVIDIA, MANIFESTS, REMOVED, STAGING, STATE, TREES, driver_root, times_file
from agent.model.text import sha256
from agent.system.deadlines import call_device
from agent.system.files import NOT_FOUND, System, mounted
from agent.system.trust import classify_error, entries_if_present, read_seen

OVERLAY = "overlay"
STATE_IS_LINKED = f"systemd mounts nothing below {STATE}, because there is a symbolic link on its path"
"""Begins the message that names the link. systemd mounts nothing if the path in Where= contains a link
(unit_fail_if_noncanonical in its src/core/unit.c)."""
INDICES = 64
"""Number of mount points, one per index. The indices of removed driver roots are used again."""
STAGED_AGAIN = "the driver root will be staged again"
"""Ends the messages about driver roots whose manifest or files cannot be used."""
SPARE = 2
"""Number of free indices that a pass needs. Only NVIDIA's driver has driver roots, and a pass stages at most two roots:
one for the loaded kernel module, and one for newer files."""


class Staged(Struct, frozen=True):
    """The driver roots on disk."""

    roots: tuple[StagedRoot, ...]
    next_index: int
    problems: tuple[str, ...] = ()
    mounted: bool = False
    """HOST_NVIDIA is mounted, so published driver roots are mounts inside it."""
    plain: tuple[int, ...] = ()
    """Indices of driver roots that are published as plain directories, not as mounts."""
    corrupt: tuple[int, ...] = ()
    """Indices of driver roots that are incomplete or have no usable manifest; empty if a manifest could not be read."""
    leftovers: tuple[str, ...] = ()
    """Paths in STAGING and REMOVED."""
    unseen: str = ""
    """Why some driver roots could not be observed; empty if all were."""


def why_state_is_not_mounted(system: System) -> str:
    """Return why systemd mounts no driver root: a symbolic link on the path. Empty if there is none."""
    here = ""
    for part in STATE.strip("/").split("/"):
        here = f"{here}/{part}"
        if isinstance(read_seen(system.read_link, here), str):
            return f"{STATE_IS_LINKED}: replace the link {here} with a bind mount"
    return ""


def observe_staged(system: System) -> Staged:
    """Return the driver roots on disk. An unusable manifest becomes a problem in the result, not an exception."""
    try:
        mounts = mounted(system, OVERLAY)
        is_mounted = HOST_NVIDIA in mounts
        trees, manifests = _indices(system, TREES, ending=""), _indices(system, MANIFESTS, ending=".json")
        leftovers: list[str] = []
        for directory in (STAGING, REMOVED):
            # A directory that this user may not read counts as empty: any user may run `plan`.
            with contextlib.suppress(PermissionError):
                leftovers += (f"{directory}/{name}" for name in entries_if_present(system, directory))
        plain = set() if is_mounted else {each for each in manifests - trees if _is_plain(each, system)}
    except OSError as error:
        return Staged((), 0, unseen=classify_error(error.filename or "driver roots", error).why)
    problems = [linked] if (linked := why_state_is_not_mounted(system)) else []
    roots, unseen = [], list[str]()
    for index in sorted(manifests):
        path = f"{MANIFESTS}/{index}.json"
        try:
            root = parse_manifest(path, system.read(path))
            if root.index != index:
                raise DocumentError(f"{path}: index {root.index} does not match the file's name", STAGED_AGAIN)
            if index not in trees | plain:
                raise DocumentError(f"{path}: the files of driver root {index} are missing", STAGED_AGAIN)
            roots.append(replace(root, hidden=index in trees and driver_root(index) not in mounts))
        except DocumentError as error:
            problems.append(str(error))
        except OSError as error:
            failure = classify_error(path, error)
            # A failure other than Unseen means that the manifest is damaged: for example, a directory is in its place.
            (unseen if isinstance(failure, Unseen) else problems).append(failure.why)
    complete = {root.index for root in roots}
    return Staged(
        roots=tuple(sorted(roots)),
        next_index=_next_index(trees | manifests, system, protected=is_mounted),
        problems=tuple(problems),
        mounted=is_mounted,
        plain=tuple(sorted(plain)),
        corrupt=() if unseen else tuple(sorted((trees | manifests) - complete)),
        leftovers=tuple(leftovers),
        unseen="; ".join(unseen),
    )


def _indices(system: System, directory: str, *, ending: str) -> set[int]:
    """Return the index of each entry whose name is an index followed by `ending`. All other entries are ignored."""
    try:
        entries = system.entries(directory)
    except FileNotFoundError:
        return set()
    names = {name.removesuffix(ending) for name in entries if name.endswith(ending)}
    return {int(name) for name in names if name.isdecimal() and len(name) < 10 and name == str(int(name))}


def _is_plain(index: int, system: System) -> bool:
    """Return whether the driver root is a plain directory, not a link, which root in a machine may make."""
    try:
        return stat.S_ISDIR(system.owner(driver_root(index))[0])
    except OSError as error:
        if error.errno in NOT_FOUND:
            return False
        raise


def _next_index(taken: set[int], system: System, *, protected: bool) -> int:
    """Return the index for the next driver root.

    It is the index above all taken ones or, if too few mount points are left there, the lowest free index. The
    SPARE - 1 indices after the returned one are free too. `protected` means that HOST_NVIDIA is mounted. If HOST_NVIDIA
    is not mounted, machines can create directories in it, so an index is skipped if its directory exists already. If
    every index is taken or skipped, the index above all taken ones is returned: it may have no mount point, and its
    directory may exist.
    """
    above, end = max(taken, default=-1) + 1, INDICES - SPARE + 1
    unused = (each for each in (*range(above, end), *range(end)) if taken.isdisjoint(range(each, each + SPARE)))
    return next((each for each in unused if protected or not system.exists(driver_root(each))), above)


# Finds driver roots whose files have the same content as the host's files, but other times of modification.
#
# That happens after a reinstallation of the driver: without this, the whole driver would be staged again. The agent
# compares the content once. If the content is the same, the agent records the new times.


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
    current: dict[StagedRoot, StagedRoot] = {}
    for root in roots:
        # An unusable record is ignored: it costs only one more comparison.
        times = _TIMES.read_seen(times_file(root.index), system)
        current[root] = root
        if isinstance(times, _Times) and times.of == _digest(root):
            current[root] = replace(root, files=_with_mtimes(root.files, times.mtimes))
    records: dict[str, bytes] = {}
    for vendor in vendors:
        user_space = vendor.driver.user_space if vendor.driver else None
        if user_space is None or not isinstance(user_space.files, tuple):
            continue
        files = tuple(sorted(user_space.files))
        candidates = [each for each in current if (each.vendor, each.version) == (vendor.vendor, user_space.version)]
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


def _with_mtimes(files: Iterable[Library], mtimes: Mapping[str, int]) -> tuple[Library, ...]:
    return tuple(replace(file, mtime_ns=mtimes.get(file.target, file.mtime_ns)) for file in files)


def _same_content(root: StagedRoot, files: tuple[Library, ...], system: System) -> bool:
    """Return whether the root has the same files as the host, except for their times."""
    if tuple(sorted(_with_mtimes(root.files, {file.target: file.mtime_ns for file in files}))) != files:
        return False
    comparison = hash((system.root, root, files))
    if comparison in _different:
        return False
    before = {file.target: file.mtime_ns for file in root.files}

    def same_file(file: Library) -> bool:
        with (
            system.open_public(file.source) as source,
            # Read the copy in TREES, not in the published root: if that is a plain directory, machines can change it. A
            # root that is a plain directory has no files in TREES, so opening one fails, and the root counts as
            # different.
            system.open_public(f"{TREES}/{root.index}/{file.target}") as copy,
        ):
            now = os.fstat(source.fileno())
            if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
                return False
            while content := source.read(CHUNK):
                if copy.read(CHUNK) != content:
                    return False
            return not copy.read(1)

    # A file whose text the agent rewrites has its text in `files`, and the check above has compared it already.
    touched = [file for file in files if file.mtime_ns != before[file.target] and not file.text]
    try:
        same = call_device(f"the content of driver root {root.index}", lambda: all(map(same_file, touched)), LIMIT)
    except OSError:
        # The comparison took too long, or a file was replaced or removed meanwhile. The next pass observes the change.
        same = False
    if not same:
        _different.add(comparison)
    return same
