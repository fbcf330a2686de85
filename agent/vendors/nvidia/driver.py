"""NVIDIA's driver on the host: the loaded module, the user space beside it, and its services."""

import re

from agent.facts import Absent, Broken, DeviceNode, Driver, Seen, ServiceDirectory, Unseen
from agent.identity import DeviceKind, FileIdentity
from agent.system.deadlines import read_device_text
from agent.system.files import System
from agent.system.looking import look
from agent.vendors.nvidia.gpus import has_nvswitch
from agent.vendors.nvidia.sockets import DIRECTORIES, WRITABLE
from agent.vendors.nvidia.user_space import UserSpace
from agent.vendors.protocols import Sources

MODULE_VERSION = "/sys/module/nvidia/version"
PROC_VERSION = "/proc/driver/nvidia/version"
VERSION = re.compile(r"[0-9]+\.[0-9.]*[0-9]")
"""In PROC_VERSION the first such token of the first line: the text before it differs between the two flavours."""

PERSISTENCE_UNIT = "nvidia-persistenced.service"
FABRIC_UNIT = "nvidia-fabricmanager.service"
SERVICES: tuple[str, ...] = (PERSISTENCE_UNIT, FABRIC_UNIT)
MODULE_NAMES: tuple[str, ...] = ("nvidia*",)
"""nvidia, nvidia_uvm, nvidia_modeset, nvidia_drm, nvidia_peermem, nvidia_fs."""


def observe_driver(
    sources: Sources, module: Seen[str], user_space: UserSpace, nodes: Seen[tuple[DeviceNode, ...]]
) -> Driver:
    """What is loaded, what is installed, and what runs."""
    return Driver(
        module_version=module,
        library_version=user_space.version,
        files=user_space.files,
        not_installed=user_space.not_installed,
        other_version=user_space.other_version,
        place=user_space.place,
        place_name=user_space.place_name,
        refused_places=user_space.refused_places,
        other_places=user_space.other_places,
        passed_over=user_space.passed_over,
        configured=user_space.configured,
        fabric=_fabric(sources, nodes),
        persistence=sources.units.get(PERSISTENCE_UNIT, Unseen(f"{PERSISTENCE_UNIT} was not asked for")),
    )


def observe_services(system: System) -> tuple[ServiceDirectory, ...]:
    """Directories of daemons' sockets that are there; a link is none. One that cannot be looked at is left out.

    One that clients may write in has to be a file system of its own: they could fill the host's /run.
    """
    found = []
    for name, path in DIRECTORIES.items():
        identity = look(system.identity, path)
        real = isinstance(identity, FileIdentity) and system.is_directory(path) and system.read_link(path) is None
        writable = name in WRITABLE
        if isinstance(identity, FileIdentity) and real and (not writable or system.is_mount(path)):
            found.append(ServiceDirectory(name, path, identity.inode, writable))
    return tuple(found)


def observe_module(system: System) -> Seen[str]:
    """The loaded module's version; Absent when it is not loaded."""
    text = look(lambda path: read_device_text(system, path), MODULE_VERSION)
    if isinstance(text, str):
        version = text.strip()
        return version if VERSION.fullmatch(version) else Broken(f"{MODULE_VERSION}: {version[:80]!a}")
    if not isinstance(text, Absent):
        return text
    text = look(lambda path: read_device_text(system, path), PROC_VERSION)
    if isinstance(text, Absent):
        return Absent("the kernel module nvidia is not loaded")
    if not isinstance(text, str):
        return text
    match = VERSION.search(text.partition("\n")[0])
    return match[0] if match else Broken(f"{PROC_VERSION}: no version in {text[:80]!a}")


def _fabric(sources: Sources, nodes: Seen[tuple[DeviceNode, ...]]) -> Seen[str]:
    by_node = isinstance(nodes, tuple) and any(node.kind is DeviceKind.NVSWITCH for node in nodes)
    if not by_node and not has_nvswitch(sources.pci):
        return Absent("no NVSwitch") if isinstance(sources.pci, tuple) else Unseen(sources.pci.why)
    state = sources.units.get(FABRIC_UNIT, Unseen(f"{FABRIC_UNIT} was not asked for"))
    if isinstance(state, Absent):
        # Absent is kept for hosts that need no fabric manager; here the GPUs cannot be used without it.
        return Broken(f"this host has NVSwitch, but {FABRIC_UNIT} is not installed")
    return state
