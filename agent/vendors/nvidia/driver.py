"""Observes NVIDIA's driver on the host: the loaded module and the driver's services."""

import contextlib
import re

from agent.model.facts import Absent, Broken, DeviceNode, Driver, Seen, ServiceDirectory, Unseen, UserSpace
from agent.system.deadlines import read_device_text
from agent.system.files import System
from agent.system.processes import program_runs
from agent.system.seen import read_seen
from agent.vendors.host_vendor import Sources
from agent.vendors.nvidia.fabric import FABRIC_UNIT, PERSISTENCE_UNIT, RUNNING, observe_fabric, observe_fabric_service
from agent.vendors.nvidia.sockets import DIRECTORIES, WRITABLE
from agent.vendors.nvidia.user_space.places import HOST_CACHE

MODULE_VERSION = "/sys/module/nvidia/version"
PROC_VERSION = "/proc/driver/nvidia/version"
VERSION = re.compile(r"[0-9]{1,9}\.[0-9.]*[0-9]")
"""A driver's version. In PROC_VERSION, it is the first match in the first line; the text before it differs between the
open and the proprietary module."""

PERSISTENCE_DAEMON = "nvidia-persistenced"
SERVICES: tuple[str, ...] = (PERSISTENCE_UNIT, FABRIC_UNIT)
MODULE_NAMES: tuple[str, ...] = ("nvidia*",)
"""Pattern of nvidia, nvidia_uvm, nvidia_modeset, nvidia_drm, nvidia_peermem and nvidia_fs."""


def observe_driver(
    sources: Sources, module: Seen[str], user_space: UserSpace, nodes: Seen[tuple[DeviceNode, ...]]
) -> Driver:
    """Return the driver's facts: what is loaded, installed and running."""
    persistence = sources.units.get(PERSISTENCE_UNIT, Unseen(f"{PERSISTENCE_UNIT} was not observed"))
    # A driver from the host's packages includes the daemon's unit. If the driver is from elsewhere, such as a driver
    # container, the daemon may run without the unit. Only in that case are all processes searched for the daemon.
    elsewhere = user_space.place_name not in ("", HOST_CACHE)
    if isinstance(persistence, Absent | Broken) and elsewhere and program_runs(sources.system, PERSISTENCE_DAEMON):
        persistence = RUNNING
    fabric = observe_fabric(sources, nodes)
    started = sources.started(PERSISTENCE_UNIT) if isinstance(persistence, str) and persistence != RUNNING else 0
    return Driver(module, user_space, fabric, persistence, started, observe_fabric_service(sources, nodes, fabric))


def observe_services(system: System) -> tuple[ServiceDirectory, ...]:
    """Return the existing directories for daemons' sockets.

    Symbolic links, and directories that could not be observed, are left out. A directory in which clients may write is
    also left out if it is not a mount point, because clients could then fill the host's /run.
    """
    found = []
    for name, path in DIRECTORIES.items():
        writable = name in WRITABLE
        with contextlib.suppress(OSError):
            real = system.is_directory(path, follow=False) and (not writable or system.is_mount(path))
            inode = system.link_inode(path)
            if real and inode is not None:
                found.append(ServiceDirectory(name, path, inode, writable))
    return tuple(found)


def observe_module(system: System) -> Seen[str]:
    """Return the loaded module's version; Absent if it is not loaded."""
    text = read_seen(lambda path: read_device_text(system, path), MODULE_VERSION)
    if isinstance(text, str):
        version = text.strip()
        return version if VERSION.fullmatch(version) else Broken(f"{MODULE_VERSION}: not a version: {version[:80]!a}")
    if not isinstance(text, Absent):
        return text
    text = read_seen(lambda path: read_device_text(system, path), PROC_VERSION)
    if isinstance(text, Absent):
        return Absent("the kernel module nvidia is not loaded")
    if not isinstance(text, str):
        return text
    match = VERSION.search(text.partition("\n")[0])
    return match[0] if match else Broken(f"{PROC_VERSION}: no version in {text[:80]!a}")
