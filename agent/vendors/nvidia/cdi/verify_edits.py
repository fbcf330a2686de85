"""Verifies the container edits in a CDI specification: anything that is not expected is refused. Pure.

What nvidia-ctk writes is expected (1.18 to 1.20: internal/edits, internal/discover, internal/platform-support/dgpu in
the toolkit's source), but only for granted nodes and files.
"""

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from agent.model.device import DeviceKind, DeviceNumber
from agent.model.handoff import Request
from agent.vendors.cdi.document import items, objects, strings
from agent.vendors.nvidia import sockets
from agent.vendors.nvidia.cdi.command import HOOK

EDITS = frozenset({"env", "deviceNodes", "hooks", "mounts", "additionalGids"})
NODE_KEYS = frozenset({"path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"})
MOUNT_KEYS = frozenset({"hostPath", "containerPath", "options"})
MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "bind", "rprivate")
HOOK_KEYS = frozenset({"hookName", "path", "args", "env"})
PERMISSIONS = (None, "rw", "rwm")
"""Permissions that nodes may have. nvidia-ctk 1.19 writes rwm; with `m`, a container can make the node again."""

CONFIG_DIRECTORIES = ("etc", "usr/local/share", "usr/share")
"""Where nvidia-ctk looks for Vulkan's JSON files. It mounts all these files below /etc in containers (graphics.go)."""
MADE_LINKS = (
    # nvidia-ctk makes these links for applications, whether or not the driver has them (symlinks.go, graphics.go).
    "libcuda.so",
    "libGLX_indirect.so.0",
    "libnvidia-opticalflow.so",
    "libnvidia-vulkan-producer.so",
    "libglxserver_nvidia.so",
    "gbm/nvidia-drm_gbm.so",
)
BY_PATH = re.compile(r"/dev/dri/by-path/pci-(?P<address>[0-9a-fA-F:.]+)-(?P<kind>card|render)")
BY_PATH_KINDS = {"card": DeviceKind.DRI_CARD, "render": DeviceKind.DRI_RENDER}


MEMORY_LIMITS = "apply-cuda-memory-limits"
OTHER_HOOKS = frozenset(
    {"enable-cuda-compat", "disable-device-node-modification", "update-application-profile", MEMORY_LIMITS}
)


class Expectations:
    """What edits may contain. The sets are made once, because a specification has hundreds of entries to compare."""

    def __init__(self, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]) -> None:
        """Prepare the comparison.

        `live` maps the paths of the granted nodes that exist in the machine to their numbers, modes and owners.
        `present` contains those `hostPath`s of the specification's mounts that exist in the machine: what CDI calls the
        host is the machine.
        """
        self.live, self.present = live, present
        self.driver_root = request.driver_root
        self.granted = {device.path: (device.major, device.minor) for device in request.devices}
        self.by_path = {(device.path, device.kind, device.pci_address) for device in request.devices}
        """Paths, kinds and PCI addresses of nodes, to verify links to DRM nodes."""
        targets = [file.target for file in request.files]
        self.files = {f"{self.driver_root}/{target}": target for target in targets} if self.driver_root else {}
        """Paths below the driver root, by path in the machine."""
        self.environment = {f"{each.name}={each.value}" for each in request.environment}
        self.hooks = OTHER_HOOKS & set(request.cdi_hooks)
        self.driver_version = request.driver_version
        self.sockets = sockets.mount_points(request.sockets)
        """Paths in pods of daemons' sockets, by path in the machine."""
        self.directories = {f"/{posixpath.dirname(target)}" for target in targets}
        """Directories of the driver's files as containers see them."""
        self.library_directories = {f"/{posixpath.dirname(target)}" for target in targets if ".so" in target}
        self.links = {f"/{file.target}" for file in request.files if file.link} | {
            posixpath.join(directory, name) for directory in self.library_directories for name in MADE_LINKS
        }
        """Links that a hook may make in containers: the driver root's own, and MADE_LINKS."""


def edits_problems(where: str, edits: dict[str, Any], expected: Expectations) -> Iterator[str]:
    """Yield what is wrong with one `containerEdits`. Raises DocumentError if it is malformed."""
    foreign = sorted(set(edits) - EDITS)
    if foreign:
        yield f"{where}: unknown key {', '.join(foreign)}"
    for node in objects(edits, "deviceNodes"):
        yield from _node_problems(where, node, expected)
    for mount in objects(edits, "mounts"):
        yield from _mount_problems(where, mount, expected)
    nodes = strings(edits, "deviceNodes", "path")
    for hook in objects(edits, "hooks"):
        yield from _hook_problems(where, hook, nodes, expected)
    for setting in items(edits, "env"):
        if not _variable_allowed(setting, expected):
            yield f"{where}: unexpected environment variable {setting!r}"
    groups = {number.gid for number in expected.live.values()} - {0}
    for gid in items(edits, "additionalGids"):
        if type(gid) is not int or gid not in groups:
            yield f"{where}: additional group {gid!r}, which no granted device node has"


def _node_problems(where: str, node: dict[str, Any], expected: Expectations) -> Iterator[str]:
    path = node.get("path")
    if not isinstance(path, str) or path not in expected.granted:
        yield f"{where}: device node {path!r} is not granted to this machine"
        return
    if node.get("hostPath", path) != path or set(node) - NODE_KEYS or node.get("type", "c") != "c":
        yield f"{where}: device node {path} has unexpected fields: {node!r}"
    if node.get("permissions") not in PERMISSIONS:
        yield f"{where}: device node {path} has permissions {node['permissions']!r}, not rw or rwm"
    number = expected.live.get(path)
    if number is None:
        yield f"{where}: device node {path} is not in this machine"
        return
    live_number = f"{number.major}:{number.minor}"
    if (number.major, number.minor) != expected.granted[path]:
        major, minor = expected.granted[path]
        yield f"{where}: device node {path} is {live_number} in this machine, but {major}:{minor} was granted"
    # nvidia-ctk omits a minor of 0. If the major is omitted, the container runtime looks up both numbers.
    written = (node.get("major"), node.get("minor", 0))
    # The types are compared too: 1, 1.0 and True are equal in Python.
    well_formed = all(type(each) is int for each in written)
    if "major" in node and not (well_formed and written == (number.major, number.minor)):
        specified = f"{written[0]}:{written[1]}"
        yield f"{where}: device node {path} is {specified} in the specification, but {live_number} in this machine"
    for key, value in (("fileMode", number.mode), ("uid", number.uid), ("gid", number.gid)):
        if key in node and (type(node[key]) is not int or node[key] != value):
            specified = f"{key} {node[key]!r}"
            yield f"{where}: device node {path} has {specified} in the specification, but {value} in this machine"


def _mount_problems(where: str, mount: dict[str, Any], expected: Expectations) -> Iterator[str]:
    source, options = mount.get("hostPath"), items(mount, "options")
    if isinstance(source, str) and source in expected.sockets:
        wanted = {"hostPath": source, "containerPath": expected.sockets[source], "options": [*sockets.MOUNT_OPTIONS]}
        if mount != wanted:
            yield f"{where}: mount of {source} is {mount!r}, not {wanted!r}"
        elif source not in expected.present:
            yield f"{where}: mount of {source}, which does not exist"
        return
    file = expected.files.get(source) if isinstance(source, str) else None
    if file is None:
        root = expected.driver_root or "(none)"
        yield f"{where}: mount of {source!r}, which is not a file of the driver root {root}"
    elif source not in expected.present:
        yield f"{where}: mount of {source}, which does not exist"
    elif mount.get("containerPath") not in _mount_points(file):
        yield f"{where}: mount of {source} at unexpected {mount.get('containerPath')!r}"
    if set(mount) - MOUNT_KEYS:
        yield f"{where}: mount of {source!r} has unknown key {', '.join(sorted(set(mount) - MOUNT_KEYS))}"
    if "ro" not in options:
        yield f"{where}: mount of {source!r} is not read-only"
    foreign = [each for each in options if each not in MOUNT_OPTIONS]
    if foreign:
        yield f"{where}: mount of {source!r} has unexpected options {foreign}"


def _mount_points(file: str) -> tuple[str, ...]:
    """Return the paths that a file of the driver root may have in containers."""
    names = (file.removeprefix(f"{directory}/") for directory in CONFIG_DIRECTORIES)
    return (f"/{file}", *(f"/etc/{name}" for name in names if name.startswith("vulkan/")))


def _hook_problems(where: str, hook: dict[str, Any], nodes: Collection[str], expected: Expectations) -> Iterator[str]:
    arguments = items(hook, "args")
    stage = "createRuntime" if arguments[1:2] == [MEMORY_LIMITS] else "createContainer"
    well_formed = (
        not set(hook) - HOOK_KEYS
        and (hook.get("path"), hook.get("hookName")) == (HOOK, stage)
        and arguments[:1] == [posixpath.basename(HOOK)]
        and all(each == "NVIDIA_CTK_DEBUG=false" for each in items(hook, "env"))
    )
    match arguments[1:]:
        case ["update-ldcache", *flags] if well_formed:
            wrong = [each for each in _pairs(flags) if each[0] != "--folder" or each[1] not in expected.directories]
        case ["create-symlinks", *flags] if well_formed:
            wrong = [
                each for each in _pairs(flags) if each[0] != "--link" or not _link_allowed(each[1], nodes, expected)
            ]
        case [str(name), *flags] if well_formed and name in expected.hooks:
            joined = " ".join(map(str, flags))
            wrong = [] if re.fullmatch(_argument_pattern(name, expected), joined) else [(joined, "")]
        case _:
            yield f"{where}: unexpected hook {hook.get('hookName')} {hook.get('path')} {arguments[1:2]}"
            return
    for flag, value in wrong:
        yield f"{where}: unexpected hook argument {arguments[1]} {flag} {value}"


def _argument_pattern(hook: str, expected: Expectations) -> str:
    """Return the pattern that the arguments of one of OTHER_HOOKS, joined by spaces, must match.

    The pattern describes what nvidia-ctk writes (internal/discover in the toolkit's source: hooks.go, compat_libs.go).
    """
    match hook:
        case "enable-cuda-compat":
            return f"(--host-driver-version={re.escape(expected.driver_version)})?"
        case "apply-cuda-memory-limits":
            return f"--driver-root {re.escape(expected.driver_root)}( --gpu-id (GPU|MIG)-[0-9a-f-]{{36}})+"
        case _:
            return ""


def _pairs(arguments: list[Any]) -> list[tuple[str, str]]:
    """Return flags with their values. A value that is not a string becomes text that is never allowed."""
    texts = [each if isinstance(each, str) else repr(each) for each in arguments]
    return list(zip(texts[::2], [*texts[1::2], ""], strict=False))


def _link_allowed(argument: str, nodes: Collection[str], expected: Expectations) -> bool:
    """Return whether a hook may make the link that `argument` describes: `TARGET::LINK`.

    `nodes` has the paths of the nodes in the same edits. A link in /dev/dri/by-path must lead to a granted DRM node
    whose path is in `nodes`. Any other link must be one of the driver root's links or of MADE_LINKS, and must lead into
    a directory with driver libraries.
    """
    target, separator, link = argument.partition("::")
    if not separator or not target or posixpath.normpath(link) != link:
        return False
    leads_to = posixpath.normpath(posixpath.join(posixpath.dirname(link), target))
    by_path = BY_PATH.fullmatch(link)
    if by_path:
        wanted = (leads_to, BY_PATH_KINDS[by_path["kind"]], by_path["address"].lower())
        return leads_to in nodes and wanted in expected.by_path
    return link in expected.links and posixpath.dirname(leads_to) in expected.library_directories


def _variable_allowed(setting: object, expected: Expectations) -> bool:
    if not isinstance(setting, str):
        return False
    if setting in expected.environment:
        return True
    name, _, value = setting.partition("=")
    if name == "NVIDIA_VISIBLE_DEVICES":
        # `void` keeps nvidia-container-runtime from adding devices to a container that already has the CDI edits.
        return value == "void"
    return name == "NVIDIA_CTK_LIBCUDA_DIR" and set(value.split(":")) <= expected.directories
