"""Put a driver root on disk, complete before it is published and immutable after; and take it away again."""

import contextlib
import os
from collections.abc import Callable
from typing import BinaryIO

from agent.errors import ApplyError
from agent.facts import Library, StagedRoot
from agent.identity import FileIdentity
from agent.manifest import render_manifest, render_origin
from agent.paths import HOST_NVIDIA, MANIFESTS, REMOVED, STAGING, origin_file
from agent.system.files import System

MARGIN = 64 << 20
"""Bytes that must stay free on the file system after staging: the agent's state lies there too."""

REMOVAL_LIMIT = 60
"""Seconds for one removal: root in a machine can have put any number of files into a driver root."""


def stage(root: StagedRoot, system: System, progress: Callable[[], None] = lambda: None) -> None:
    """Copy (reflink where the file system can), record, then publish by one rename. Raises ApplyError, OSError.

    `progress` hears of each file that is on disk, and of parts of large ones.
    """
    system.make_directory(HOST_NVIDIA)
    system.make_directory(STAGING)
    _clear(system)
    needed = sum(file.size for file in root.files) + MARGIN
    free = system.free_bytes(STAGING)
    if free < needed:
        raise ApplyError(
            f"{STAGING}: {free >> 20} MiB are free and driver {root.version} needs {needed >> 20} MiB",
            "free space on that file system",
        )
    partial = f"{STAGING}/{root.index}"
    identities = {}
    for file in root.files:
        path = f"{partial}/{file.target}"
        system.make_directory(os.path.dirname(path))
        if file.link:
            system.link(path, file.link)
        else:
            identities[file.target] = _copy(file, path, system, progress)
            progress()
    for directory in {os.path.dirname(f"{partial}/{file.target}") for file in root.files}:
        system.sync_directory(directory)
    manifest = render_manifest(root, identities)
    if root.place:
        system.write(origin_file(root.index), render_origin(root.place, manifest))
    system.write(f"{MANIFESTS}/{root.index}.json", manifest)
    system.rename(partial, f"{HOST_NVIDIA}/{root.index}")


def _copy(file: Library, path: str, system: System, progress: Callable[[], None]) -> FileIdentity:
    """From the descriptor that was checked, as who can write where the file is may exchange it at any moment."""
    try:
        reading = system.open_public(file.source)
    except OSError as error:
        raise _changed(file, f": {error.strerror}") from error
    with reading:
        _check(file, reading)
        if file.text:
            system.write(path, file.text.encode())
        else:
            system.copy(reading, path, 0o755 if file.executable else 0o644, progress)
        _check(file, reading)
    copied = system.identity(path)
    if copied.size != (len(file.text.encode()) or file.size):
        raise _changed(file)
    return copied


def _check(file: Library, reading: BinaryIO) -> None:
    """Raises ApplyError where it is not what was seen."""
    now = os.fstat(reading.fileno())
    if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
        raise _changed(file)


def _changed(file: Library, why: str = "") -> ApplyError:
    return ApplyError(f"{file.source}: changed while it was staged{why}", "the next pass looks again")


def _clear(system: System) -> None:
    """Remove what an interrupted staging left."""
    for name in system.entries(STAGING):
        system.remove_tree(f"{STAGING}/{name}")


def remove_root(index: int, system: System) -> None:
    """Out of the machines' sight by one rename, then for good. Raises AgentError, OSError.

    A container that runs keeps its files: each is a bind mount, which holds the inode whatever becomes of the path.
    But one that is restarted looks for the path anew, so that `agent.plan.driver_roots` decides what may go.
    """
    system.make_directory(REMOVED)
    removed = f"{REMOVED}/{index}"
    clear((removed,), system)
    with contextlib.suppress(FileNotFoundError):
        system.rename(f"{HOST_NVIDIA}/{index}", removed)
    system.remove(origin_file(index))
    # After the root: a root without a manifest would be found only by guessing its index.
    system.remove(f"{MANIFESTS}/{index}.json")
    clear((removed,), system)


def clear(paths: tuple[str, ...], system: System) -> None:
    """Remove trees that may hold what a machine put there. Raises AgentError."""
    # rm(1), not shutil: it goes to any depth (Python's recursion ends at 1000 before 3.13), and can be ended.
    system.run("rm", "--recursive", "--force", "--one-file-system", "--", *paths, timeout=REMOVAL_LIMIT)
