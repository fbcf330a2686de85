"""Stages complete driver roots on disk, and removes them. agent.host.apply.publishing shows them to machines."""

import contextlib
import os
from collections.abc import Callable
from typing import BinaryIO

from agent.host.apply.publishing import mount_parent, unpublish, unpublish_parent
from agent.host.observe.driver_roots import OVERLAY, observe_staged
from agent.host.state.driver_roots import render_manifest
from agent.model.driver_root import Library, StagedRoot
from agent.model.errors import AgentError, ApplyError
from agent.model.paths import (
    HOST_NVIDIA,
    MANIFESTS,
    REMOVED,
    STAGING,
    STATE,
    TREES,
    driver_root,
    mount_unit,
    times_file,
)
from agent.system.clearing import clear
from agent.system.copy import Copies
from agent.system.files import System, temporary_path
from agent.system.mounts import mounted

MARGIN = 64 << 20
"""Bytes that must stay free on the file system after staging, for the agent's state."""

RELOAD_LIMIT = 60.0
"""Seconds that systemd may take to reload its units."""
REMOVAL_LIMIT = 10.0
"""Seconds until a removal stops; later passes continue it. Root in a machine may have added any number of files."""
LEFTOVERS_LIMIT = 1.0
"""Seconds until a removal of leftovers stops. The limit is lower, because no other step needs this removal."""


def stage(root: StagedRoot, system: System, progress: Callable[[], None] = lambda: None) -> None:
    """Copy a driver root to disk, by reflink if possible. Raises ApplyError, OSError.

    The root is copied to STAGING and recorded in a manifest; then a rename moves it to TREES. Calls `progress` after
    each file, after each part of a large file, and each time that the disk has written a file.
    """
    system.make_directory(TREES)
    system.make_directory(STAGING)
    _clear_staging(system)
    needed = sum(file.size for file in root.files) + MARGIN
    free = system.free_bytes(STAGING)
    if free < needed:
        raise ApplyError(
            f"{STAGING}: driver {root.version} needs {needed >> 20} MiB, but only {free >> 20} MiB are free",
            "free up space on that file system",
        )
    partial = f"{STAGING}/{root.index}"
    with Copies(progress) as copies:
        for file in root.files:
            path = f"{partial}/{file.target}"
            system.make_directory(os.path.dirname(path))
            if file.link:
                system.link(path, file.link)
            else:
                _copy(file, path, system, copies)
                progress()
    for directory in {os.path.dirname(f"{partial}/{file.target}") for file in root.files}:
        system.sync_directory(directory)
    system.write(f"{MANIFESTS}/{root.index}.json", render_manifest(root))
    system.rename(partial, f"{TREES}/{root.index}")


def _copy(file: Library, path: str, system: System, copies: Copies) -> None:
    """Copy a file from the descriptor that was checked, because the path may lead to a different file at any moment."""
    try:
        reading = system.open_public(file.source)
    except OSError as error:
        raise _changed(file, f": {error.strerror}") from error
    with reading:
        _check(file, reading)
        if file.text:
            system.write(path, file.text.encode())
        else:
            system.copy(reading, path, 0o755 if file.executable else 0o644, copies)
        _check(file, reading)
    if system.identity(path).size != (len(file.text.encode()) or file.size):
        raise _changed(file)


def _check(file: Library, reading: BinaryIO) -> None:
    """Raise ApplyError if the file changed since it was observed."""
    now = os.fstat(reading.fileno())
    if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
        raise _changed(file)


def _changed(file: Library, why: str = "") -> ApplyError:
    return ApplyError(f"{file.source}: changed while it was staged{why}", "the next pass tries again")


def _clear_staging(system: System) -> None:
    """Remove what an interrupted staging left."""
    for name in system.entries(STAGING):
        system.remove_tree(f"{STAGING}/{name}")


def remove_root(index: int, system: System) -> None:
    """Hide a driver root from machines, then delete it. Raises AgentError, OSError.

    A running container keeps its files: each one is a bind mount, which does not depend on the path. A container that
    restarts needs the paths again, so `agent.host.plan.driver_roots` decides which roots may be removed.
    """
    unpublish(driver_root(index), system)
    system.make_directory(REMOVED)
    removed, tree = f"{REMOVED}/{index}", f"{TREES}/{index}"
    clear((removed,), system, REMOVAL_LIMIT)
    if system.exists(tree):
        system.rename(tree, removed)
    elif HOST_NVIDIA not in mounted(system, OVERLAY):
        _move(driver_root(index), removed, system)
    system.remove(times_file(index))
    # Remove the manifest only after the move: a driver root that is a plain directory is found only by its manifest.
    system.remove_tree(f"{MANIFESTS}/{index}.json")
    clear((removed,), system, REMOVAL_LIMIT)


def remove_all(system: System) -> None:
    """Remove all driver roots, and the units that mount them. Raises AgentError, OSError.

    No machine may run or start.
    """
    staged = observe_staged(system)
    for index in sorted({*(root.index for root in staged.roots), *staged.corrupt}):
        remove_root(index, system)
    unpublish_parent(system)
    system.run("systemctl", "daemon-reload", timeout=RELOAD_LIMIT)


def protect(indices: tuple[int, ...], system: System) -> None:
    """Move away driver roots that are plain directories, mount their parent HOST_NVIDIA, and delete the directories.

    Their content is not used again: root in a machine may have changed it, or still have a file open. The directories
    are moved back only if HOST_NVIDIA cannot be mounted. If the agent is killed before the mount, or PID 1 does not
    answer, the next pass stages the roots again. Raises AgentError, OSError.
    """
    system.make_directory(REMOVED)
    moves = [(driver_root(index), f"{REMOVED}/{index}") for index in indices]
    clear(tuple(removed for _, removed in moves), system, REMOVAL_LIMIT)
    for plain, removed in moves:
        _move(plain, removed, system)
    if not mount_parent(system):
        for plain, removed in moves:
            _move(removed, plain, system)
        raise ApplyError("driver roots stay plain directories", f"see `journalctl -b -u '{mount_unit(HOST_NVIDIA)}'`")
    for index in indices:
        # The next pass tries again if a root cannot be removed now.
        with contextlib.suppress(AgentError):
            remove_root(index, system)


def _move(path: str, to: str, system: System) -> None:
    """Rename a directory, unless it is missing. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        system.rename(path, to)


def make_way(path: str, system: System) -> None:
    """Move away a directory that occupies the path of one of the agent's files, or of its temporary file.

    Root in a machine can make such a directory inside the handoff directory, and put so many files into it that its
    removal takes a long time. So the directory is only moved, and the next pass removes it (`RemoveStaleStaging`).
    Until then, no other directory can be moved away from the same path; only that machine suffers. Raises OSError.
    """
    for each in (path, temporary_path(path)):
        # A link may stay, because the write replaces the link itself. It is not followed, because it may lead to a file
        # system that no longer answers.
        if system.is_directory(each, follow=False):
            system.make_directory(REMOVED)
            system.rename(each, f"{REMOVED}/{each.removeprefix(STATE).strip('/').replace('/', '-')}")
