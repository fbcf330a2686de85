"""Stages complete driver roots on disk, shows them to machines, and removes them.

A published driver root is an overlay file system without a writable layer. Root in a machine can remount a bind mount
writable, but not an overlay that has no layer to write to (ovl_reconfigure in fs/overlayfs). HOST_NVIDIA, which has the
mount points, is such an overlay too. Otherwise root in a machine could remove a mount point. That would unmount the
driver root in all machines (detach_mounts in fs/namei.c), and root in the machine could put something else in its
place. If overlays cannot be mounted on this host, driver roots are published as plain directories, without this
protection.

PID 1 mounts the driver roots, because processes in the service's sandbox may not mount anything, and because PID 1 also
mounts the driver roots at boot, without the service. The mounts propagate into running machines.
"""

import contextlib
import os
import posixpath
import time
from collections.abc import Callable
from typing import BinaryIO, Literal

from agent.host.observe.driver_roots import INDICES, OVERLAY, observe_staged
from agent.host.observe.machine import observe_units
from agent.host.state.records import MANIFEST
from agent.model.errors import AgentError, BusAnswerError
from agent.model.facts import Library, StagedRoot
from agent.model.paths import (
    DRIVER_ROOTS_TARGET,
    HOST_NVIDIA,
    MANIFESTS,
    MOUNT_POINTS,
    NOTHING,
    REMOVED,
    STAGING,
    STATE,
    TREES,
    UNITS,
    driver_root,
    mount_unit,
)
from agent.model.text import portion
from agent.system import systemd
from agent.system.copy import Copies, clear
from agent.system.files import System, mounted, temporary_path
from agent.system.trust import read_seen, write_record

JOB_LIMIT = 20.0
"""Seconds that PID 1 may take to mount or unmount."""
POLL = 0.05
"""Seconds between two checks whether PID 1 has finished."""
UNIT = """\
# Written by unbounded-agent, do not edit. It is a mount, because root in a machine could change a plain directory.

[Unit]
Description={description}
Before={target}
StartLimitIntervalSec=0
{needs}
[Mount]
What=overlay
Type=overlay
Where={path}
Options=ro,nosuid,nodev,nofail,lowerdir={lower}:{nothing}
TimeoutSec=15
"""
MARGIN = 64 << 20
"""Bytes that must stay free on the file system after staging, for the agent's state."""
RELOAD_LIMIT = 60.0
"""Seconds that systemd may take to reload its units."""
REMOVAL_LIMIT = 10.0
"""Seconds until a removal stops; later passes continue it. Root in a machine may have added any number of files."""
LEFTOVERS_LIMIT = 1.0
"""Seconds until a removal of leftovers stops. The limit is lower, because no other step needs this removal."""


def publish(index: int, system: System) -> None:
    """Mount driver root `index`. Raises AgentError, OSError.

    If HOST_NVIDIA cannot be mounted, or if other roots are plain directories already, the root is not mounted, but
    published as a plain directory.
    """
    staged, path, parent = observe_staged(system), driver_root(index), mount_unit(HOST_NVIDIA)
    if staged.roots_mounted or not staged.plain_roots:
        if HOST_NVIDIA not in mounted(system, OVERLAY):
            _write_parent(system)
        needs = f"Requires={parent}\nAfter={parent}\n"
        _write_unit(path, f"Driver root {index} of unbounded-agent", f"{TREES}/{index}", needs, system)
        refused = _run_job("StartUnit", mount_unit(path), system)
        if path in mounted(system, OVERLAY):
            return
        if observe_units([parent], system)[parent].unit_state != "failed":
            # PID 1 has mounted the parent, or has not tried to. So the kernel may support overlay file systems: do not
            # fall back to a plain directory.
            see = f"see `systemctl status '{parent}' '{mount_unit(path)}'`{refused}"
            raise AgentError(f"driver root {index} cannot be mounted: {see}")
        # Remove the units before the rename: at the next boot, their mounts would hide the plain directory.
        _remove_unit(path, system)
        _remove_unit(HOST_NVIDIA, system)
    # Do not mount HOST_NVIDIA here: the mount would hide other roots that are plain directories from the machines that
    # use them.
    system.make_directory(HOST_NVIDIA)
    system.rename(f"{TREES}/{index}", path)


def _unpublish(path: str, system: System) -> None:
    """Unmount a driver root, or HOST_NVIDIA. Fails while a file in it is open. Raises AgentError, OSError."""
    if path in mounted(system, OVERLAY):
        refused = _run_job("StopUnit", mount_unit(path), system)
        if path in mounted(system, OVERLAY):
            raise AgentError(f"{path} cannot be unmounted{refused}", f"see what uses it: `fuser -vm {path}`")
    _remove_unit(path, system)


def _write_parent(system: System) -> None:
    system.make_directory(NOTHING)
    for each in range(INDICES):
        system.make_directory(f"{MOUNT_POINTS}/{each}")
    _write_unit(HOST_NVIDIA, "Parent of unbounded-agent's driver roots", MOUNT_POINTS, "", system)


def _write_unit(path: str, description: str, lower: str, needs: str, system: System) -> None:
    """Write and enable a mount unit. Its content never changes, so systemd need not reload a unit that it knows."""
    name = mount_unit(path)
    unit = UNIT.format(
        description=description, target=DRIVER_ROOTS_TARGET, needs=needs, path=path, lower=lower, nothing=NOTHING
    )
    file = f"{UNITS}/{name}"
    if read_seen(lambda path: system.read_untrusted(path)[0], file) != unit.encode():
        write_record(system, file, unit.encode())
    if system.read_link(_wants_link(name)) != f"../{name}":
        system.link(_wants_link(name), f"../{name}")
        system.sync_directory(posixpath.dirname(_wants_link(name)))


def _remove_unit(path: str, system: System) -> None:
    name = mount_unit(path)
    system.remove(_wants_link(name))
    system.remove(f"{UNITS}/{name}")


def _wants_link(name: str) -> str:
    return f"{UNITS}/{DRIVER_ROOTS_TARGET}.wants/{name}"


def _run_job(verb: Literal["StartUnit", "StopUnit"], unit: str, system: System) -> str:
    """Start or stop a unit, and wait until PID 1 has tried.

    If PID 1 refuses, return `: ` and the reason, for the end of a message. Otherwise return an empty text, even if the
    attempt failed: the caller checks the mounts. Raises AgentError if PID 1 does not answer or does not finish in time.
    """
    deadline = time.monotonic() + JOB_LIMIT
    try:
        job = systemd.queue_job(verb, unit, system)
    except BusAnswerError as error:
        return f": {error}"
    while time.monotonic() < deadline:
        if not systemd.is_queued(job, system):
            return ""
        time.sleep(POLL)
    raise AgentError(f"{verb} of {unit} did not finish within {JOB_LIMIT:.0f} s", f"see `systemctl status '{unit}'`")


STEPS = 4
"""How often the copying of a driver reports how far it is, if it has at least LARGE bytes."""
LARGE = 8 << 20


def stage(root: StagedRoot, system: System, progress: Callable[[str], None] = lambda _: None) -> None:
    """Copy a driver root to disk, by reflink if possible. Raises AgentError, OSError.

    The root is copied to STAGING and recorded in a manifest; then a rename moves it to TREES. Calls `progress` after
    each file, after each part of a large file, and each time that the disk has written a file; now and then with the
    part that is copied, otherwise with an empty text.
    """
    system.make_directory(TREES)
    system.make_directory(STAGING)
    for name in system.entries(STAGING):
        system.remove_tree(f"{STAGING}/{name}")
    total, copied = sum(file.size for file in root.files), 0
    needed = total + MARGIN
    free = system.free_bytes(STAGING)
    if free < needed:
        what = f"driver {root.version} needs {needed >> 20} MiB, but only {free >> 20} MiB are free"
        raise AgentError(f"{STAGING}: {what}", "free up space on that file system")
    partial = f"{STAGING}/{root.index}"
    with Copies(lambda: progress("")) as copies:
        for file in root.files:
            path = f"{partial}/{file.target}"
            system.make_directory(os.path.dirname(path))
            if file.link:
                system.link(path, file.link)
            else:
                _copy(file, path, system, copies)
                before, copied = copied, copied + file.size
                reached = total >= LARGE and before * STEPS // total < copied * STEPS // total
                progress(f"driver {root.version}: staged {portion(copied, total)}" if reached else "")
    for directory in {os.path.dirname(f"{partial}/{file.target}") for file in root.files}:
        system.sync_directory(directory)
    system.write(f"{MANIFESTS}/{root.index}.json", MANIFEST.render(root))
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
    now = os.fstat(reading.fileno())
    if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
        raise _changed(file)


def _changed(file: Library, why: str = "") -> AgentError:
    return AgentError(f"{file.source}: changed while it was staged{why}", "the next pass tries again")


def remove_root(index: int, system: System) -> None:
    """Hide a driver root from machines, then delete it. Raises AgentError, OSError.

    A running container keeps its files: each one is a bind mount, which does not depend on the path. A container that
    restarts needs the paths again, so `agent.host.plan.driver_roots` decides which roots may be removed.
    """
    _unpublish(driver_root(index), system)
    system.make_directory(REMOVED)
    removed, tree = f"{REMOVED}/{index}", f"{TREES}/{index}"
    clear((removed,), system, REMOVAL_LIMIT)
    if system.exists(tree):
        system.rename(tree, removed)
    elif HOST_NVIDIA not in mounted(system, OVERLAY):
        _move(driver_root(index), removed, system)
    # Remove the manifest only after the move: a driver root that is a plain directory is found only by its manifest.
    manifest = f"{MANIFESTS}/{index}.json"
    system.remove_tree(manifest)
    # A killed writer left it. Nobody writes this manifest again.
    system.remove_temporary(manifest)
    clear((removed,), system, REMOVAL_LIMIT)


def remove_all(system: System) -> None:
    """Remove all driver roots, and the units that mount them; no machine may run. Raises AgentError, OSError."""
    found = observe_staged(system)
    for index in sorted({*(root.index for root in found.staged), *found.corrupt_roots}):
        remove_root(index, system)
    _unpublish(HOST_NVIDIA, system)
    system.remove_empty_directory(posixpath.dirname(_wants_link(mount_unit(HOST_NVIDIA))))
    system.run("systemctl", "daemon-reload", timeout=RELOAD_LIMIT)


def protect(indices: tuple[int, ...], system: System) -> None:
    """Move away driver roots that are plain directories, mount their parent HOST_NVIDIA, and delete the directories.

    Their content is not used again: root in a machine may have changed it, or still have a file open. The directories
    are moved back only if HOST_NVIDIA cannot be mounted. If the agent is killed before the mount, or PID 1 does not
    answer, the next pass stages the roots again. Raises AgentError, OSError.
    """
    system.make_directory(REMOVED)
    moves, parent = [(driver_root(index), f"{REMOVED}/{index}") for index in indices], mount_unit(HOST_NVIDIA)
    clear(tuple(removed for _, removed in moves), system, REMOVAL_LIMIT)
    for plain, removed in moves:
        _move(plain, removed, system)
    _write_parent(system)
    _run_job("StartUnit", parent, system)
    if HOST_NVIDIA not in mounted(system, OVERLAY):
        _remove_unit(HOST_NVIDIA, system)
        for plain, removed in moves:
            _move(removed, plain, system)
        raise AgentError("driver roots stay plain directories", f"see `journalctl -b -u '{parent}'`")
    for index in indices:
        # The next pass tries again if a root cannot be removed now.
        with contextlib.suppress(AgentError):
            remove_root(index, system)


def _move(path: str, to: str, system: System) -> None:
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
