"""Publishes driver roots, so that machines see them, and hides them again.

A published driver root is an overlay file system without a writable layer. Root in a machine can remount a bind mount
writable, but not an overlay that has no layer to write to (ovl_reconfigure in fs/overlayfs). HOST_NVIDIA, which has the
mount points, is such an overlay too. Otherwise root in a machine could remove a mount point. That would unmount the
driver root in all machines (detach_mounts in fs/namei.c), and root in the machine could put something else in its
place. If overlays cannot be mounted on this host, driver roots are published as plain directories, without this
protection.

PID 1 mounts the driver roots, because processes in the service's sandbox may not mount anything, and because PID 1 also
mounts the driver roots at boot, without the service. The mounts propagate into running machines.
"""

import posixpath
import time
from typing import Literal

from agent.host.observe.driver_roots import INDICES, OVERLAY, observe_staged
from agent.host.observe.units import observe_units
from agent.model.errors import ApplyError, BusAnswerError
from agent.model.paths import (
    DRIVER_ROOTS_TARGET,
    HOST_NVIDIA,
    MOUNT_POINTS,
    NOTHING,
    TREES,
    UNITS,
    driver_root,
    mount_unit,
)
from agent.system import systemd
from agent.system.damage import write_record
from agent.system.files import System
from agent.system.mounts import mounted
from agent.system.seen import read_seen

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


def publish(index: int, system: System) -> None:
    """Mount driver root `index`. Raises AgentError, OSError.

    If HOST_NVIDIA cannot be mounted, or if other roots are plain directories already, the root is not mounted, but
    published as a plain directory.
    """
    staged = observe_staged(system)
    if staged.mounted or not staged.plain:
        failure = _mount(index, system)
        if not failure:
            return
        if observe_units([mount_unit(HOST_NVIDIA)], system)[mount_unit(HOST_NVIDIA)].state != "failed":
            # PID 1 has mounted the parent, or has not tried to. So the kernel may support overlay file systems: do not
            # fall back to a plain directory.
            raise ApplyError(f"driver root {index} cannot be mounted: {failure}")
        # Remove the units before the rename: at the next boot, their mounts would hide the plain directory.
        _remove_unit(driver_root(index), system)
        _remove_unit(HOST_NVIDIA, system)
    # Do not mount HOST_NVIDIA here: the mount would hide other roots that are plain directories from the machines that
    # use them.
    system.make_directory(HOST_NVIDIA)
    system.rename(f"{TREES}/{index}", driver_root(index))


def mount_parent(system: System) -> bool:
    """Mount HOST_NVIDIA, which hides plain directories in it. Return whether it worked. Raises AgentError, OSError."""
    _write_parent(system)
    _run_job("StartUnit", mount_unit(HOST_NVIDIA), system)
    if HOST_NVIDIA in mounted(system, OVERLAY):
        return True
    _remove_unit(HOST_NVIDIA, system)
    return False


def unpublish(path: str, system: System) -> None:
    """Unmount a driver root, or HOST_NVIDIA. Fails while a file in it is open. Raises AgentError, OSError."""
    if path in mounted(system, OVERLAY):
        failure = _run_job("StopUnit", mount_unit(path), system)
        if path in mounted(system, OVERLAY):
            raise ApplyError(f"{path} cannot be unmounted{failure}", f"see what uses it: `fuser -vm {path}`")
    _remove_unit(path, system)


def unpublish_parent(system: System) -> None:
    """Unmount HOST_NVIDIA. No driver root may still be mounted in it. Raises AgentError, OSError."""
    unpublish(HOST_NVIDIA, system)
    system.remove_empty_directory(posixpath.dirname(_wants_link(mount_unit(HOST_NVIDIA))))


def _mount(index: int, system: System) -> str:
    """Mount driver root `index`. Return where to look if the mount failed; empty if it worked.

    Raises AgentError if PID 1 does not answer, and OSError if a unit cannot be written.
    """
    if HOST_NVIDIA not in mounted(system, OVERLAY):
        _write_parent(system)
    path, parent = driver_root(index), mount_unit(HOST_NVIDIA)
    needs = f"Requires={parent}\nAfter={parent}\n"
    _write_unit(path, f"Driver root {index} of unbounded-agent", f"{TREES}/{index}", needs, system)
    failure = _run_job("StartUnit", mount_unit(path), system)
    if path in mounted(system, OVERLAY):
        return ""
    return f"see `systemctl status '{parent}' '{mount_unit(path)}'`{failure}"


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
    raise ApplyError(f"{verb} of {unit} did not finish within {JOB_LIMIT:.0f} s", f"see `systemctl status '{unit}'`")
