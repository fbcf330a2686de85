"""Verifies the container edits in a CDI specification: anything that is not expected is a fault. Pure.

What nvidia-ctk writes is expected (1.18 to 1.20: internal/edits, internal/discover, internal/platform-support/dgpu in
the toolkit's source), but only for granted nodes and files. A later release may write something else. If that is
harmless because of what it is, it is accepted: /dev/null at VOID, a mount of a node that the container gets anyway,
data of the driver in another directory for such data, a variable that loads nothing (`is_harmless`). All else is
either dangerous or unknown (Fault).
"""

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

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
BIND_TYPES = ("none", "bind")
"""Types of a mount that say no more than the option `bind`."""
UNSAFE_OPTIONS = frozenset({"rw", "suid", "dev", "exec", "remount", "shared", "rshared", "slave", "rslave"})
"""Options that end a protection, or pass on mounts that are made later."""
VOID_VARIABLE = "NVIDIA_VISIBLE_DEVICES=void"
"""It keeps nvidia-container-runtime from adding devices to a container that already has the CDI edits: images set this
variable to `all`."""
HOOK_VARIABLE = "NVIDIA_CTK_DEBUG=false"
NEEDED_HOOKS = ("create-symlinks", "update-ldcache")
"""Hooks without which containers do not find the driver's libraries."""
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


NULL = (1, 3)
"""The number of /dev/null."""
VOID = tuple(f"{run}/nvidia-container-devices/void" for run in ("/var/run", "/run"))
"""Where nvidia-ctk mounts /dev/null since 1.20.2. nvidia-container-runtime can be configured to take each such mount
below this directory as a request for the device of that name. `void` requests nothing, and keeps the runtime from
adding devices, as NVIDIA_VISIBLE_DEVICES=void does (GetCommonEdits in pkg/nvcdi/wrapper.go)."""
REQUEST = re.compile(r"NVIDIA_(VISIBLE_DEVICES|.*_(DEVICES|CHANNELS)|GDS|GDRCOPY|MOFED|NVSWITCH)")
"""Variables that request devices of nvidia-container-runtime (internal/config/image in the toolkit's source)."""
LOADS_CODE = re.compile(
    # The dynamic loader and the C library; whatever preloads or injects (CUDA_INJECTION64_PATH); shells and
    # interpreters; the loaders of Vulkan, EGL, GLX, OpenCL, GBM and the video drivers; and all other search paths.
    r"LD_.*|GLIBC_.*|.*(PRELOAD|INJECT).*|ENV|BASH.*|SHELL.*|PROMPT_COMMAND|(PYTHON|PERL|RUBY|NODE|JAVA|_JAVA|JDK).*"
    r"|(VK|_*EGL|_*GLX|OCL|OPENCL|GBM|LIBVA|LIBGL|VDPAU|CUDA_.*MODULE)_.*|(?!NVIDIA_).*(PATH|_OPTIONS|_OPTS)",
    re.IGNORECASE,
)
"""Names of variables through which programs load code."""
PLAIN = re.compile(r"[A-Za-z0-9._,:+-]*")
"""Values that are no path."""

MEMORY_LIMITS = "apply-cuda-memory-limits"
OTHER_HOOKS = frozenset(
    {"enable-cuda-compat", "disable-device-node-modification", "update-application-profile", MEMORY_LIMITS}
)


class Fault(NamedTuple):
    """Something in a specification that is not expected."""

    text: str
    dangerous: bool = True
    """Whether the specification must be refused: with this part, a container would get more than it should, or code of
    others; or without it, a container could not use its GPU. Otherwise the part is only unknown, and the specification
    can be published without it."""


class Expectations:
    """What edits may contain. The sets are made once, because a specification has hundreds of entries to compare."""

    def __init__(
        self,
        request: Request,
        live: Mapping[str, DeviceNumber],
        present: Collection[str],
        places: Collection[str] = (),
    ) -> None:
        """Prepare the comparison.

        `live` maps the paths of nodes that exist in the machine to their numbers, modes and owners: the granted nodes,
        and those that are mounted. `present` contains those `hostPath`s of the specification's mounts that exist in the
        machine: what CDI calls the host is the machine. `places` are paths other than the driver's files that may be
        mounted if they exist.
        """
        self.live, self.present, self.places = live, present, places
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
        self.libraries = {_stem(target) for target in targets if ".so" in target}
        """Names of the driver's libraries without what follows `.so`."""
        self.library_directories = {f"/{posixpath.dirname(target)}" for target in targets if ".so" in target}
        self.links = {f"/{file.target}" for file in request.files if file.link} | {
            posixpath.join(directory, name) for directory in self.library_directories for name in MADE_LINKS
        }
        """Links that a hook may make in containers: the driver root's own, and MADE_LINKS."""

    def is_harmless_node(self, path: str) -> bool:
        """Return whether a read-only mount of the path gives a container nothing that it should not have."""
        return self.is_null(path) or (path in self.granted and path in self.live)

    def is_null(self, path: str) -> bool:
        """Return whether the path is the device that has no content and takes everything."""
        number = self.live.get(path)
        return path not in self.granted and number is not None and (number.major, number.minor) == NULL


def edits_problems(where: str, edits: dict[str, Any], expected: Expectations) -> Iterator[str]:
    """Yield what is wrong with one `containerEdits`. Raises DocumentError if it is malformed."""
    nodes = strings(edits, "deviceNodes", "path")
    faults = (
        *(fault for key in sorted(edits) for fault in edit_faults(key)),
        *(fault for node in objects(edits, "deviceNodes") for fault in node_faults(node, expected)),
        *(fault for mount in objects(edits, "mounts") for fault in mount_faults(mount, nodes, expected)),
        *(fault for hook in objects(edits, "hooks") for fault in hook_faults(hook, nodes, expected)),
        *(fault for setting in items(edits, "env") for fault in variable_faults(setting, expected)),
    )
    yield from (f"{where}: {fault.text}" for fault in faults)
    groups = {number.gid for path, number in expected.live.items() if path in expected.granted} - {0}
    for gid in items(edits, "additionalGids"):
        if type(gid) is not int or gid not in groups:
            yield f"{where}: additional group {gid!r}, which no granted device node has"


def edit_faults(key: str) -> Iterator[Fault]:
    """Yield what is wrong with a key of containerEdits. `netDevices` takes network interfaces from the machine."""
    if key not in EDITS:
        yield Fault(f"unknown key {key}", dangerous=key == "netDevices")


def node_faults(node: dict[str, Any], expected: Expectations) -> Iterator[Fault]:
    """Yield what is wrong with a device node."""
    path = node.get("path")
    if not isinstance(path, str) or path not in expected.granted:
        yield Fault(f"device node {path!r} is not granted to this machine")
        return
    if node.get("hostPath", path) != path or node.get("type", "c") != "c":
        yield Fault(f"device node {path} has unexpected fields: {node!r}")
    for key in sorted(set(node) - NODE_KEYS):
        yield Fault(f"device node {path} has unknown key {key}", dangerous=False)
    if node.get("permissions") not in PERMISSIONS:
        yield Fault(f"device node {path} has permissions {node['permissions']!r}, not rw or rwm")
    number = expected.live.get(path)
    if number is None:
        yield Fault(f"device node {path} is not in this machine")
        return
    live_number = f"{number.major}:{number.minor}"
    if (number.major, number.minor) != expected.granted[path]:
        major, minor = expected.granted[path]
        yield Fault(f"device node {path} is {live_number} in this machine, but {major}:{minor} was granted")
    # nvidia-ctk omits a minor of 0. If the major is omitted, the container runtime looks up both numbers.
    written = (node.get("major"), node.get("minor", 0))
    # The types are compared too: 1, 1.0 and True are equal in Python.
    well_formed = all(type(each) is int for each in written)
    if "major" in node and not (well_formed and written == (number.major, number.minor)):
        specified = f"{written[0]}:{written[1]}"
        yield Fault(f"device node {path} is {specified} in the specification, but {live_number} in this machine")
    for key, value in (("fileMode", number.mode), ("uid", number.uid), ("gid", number.gid)):
        if key in node and (type(node[key]) is not int or node[key] != value):
            specified = f"{key} {node[key]!r}"
            yield Fault(f"device node {path} has {specified} in the specification, but {value} in this machine")


def mount_faults(mount: dict[str, Any], nodes: Collection[str], expected: Expectations) -> Iterator[Fault]:
    """Yield what is wrong with a mount. `nodes` has the paths of the nodes in the same edits."""
    source, options = mount.get("hostPath"), items(mount, "options")
    for key in sorted(set(mount) - MOUNT_KEYS):
        # Only a bind mount shows no more than its source.
        dangerous = key == "type" and mount[key] not in BIND_TYPES
        yield Fault(f"mount of {source!r} has unknown key {key}", dangerous)
    if isinstance(source, str) and source in expected.sockets:
        wanted = {"hostPath": source, "containerPath": expected.sockets[source], "options": [*sockets.MOUNT_OPTIONS]}
        if {key: value for key, value in mount.items() if key in MOUNT_KEYS} != wanted:
            yield Fault(f"mount of {source} is {mount!r}, not {wanted!r}")
        elif source not in expected.present:
            yield Fault(f"mount of {source}, which does not exist")
        return
    yield from _source_faults(source, mount.get("containerPath"), options, nodes, expected)
    if "ro" not in options:
        yield Fault(f"mount of {source!r} is not read-only")
    for option in options:
        yield from option_faults(f"mount of {source!r}", option)


def option_faults(mount: str, option: object) -> Iterator[Fault]:
    """Yield what is wrong with an option of a mount. `mount` names the mount."""
    if option not in MOUNT_OPTIONS:
        dangerous = not isinstance(option, str) or "=" in option or option in UNSAFE_OPTIONS
        yield Fault(f"{mount} has unexpected option {option!r}", dangerous)


def _source_faults(
    source: object, target: object, options: list[Any], nodes: Collection[str], expected: Expectations
) -> Iterator[Fault]:
    """Yield what is wrong with the two paths of a mount other than a socket's."""
    if not isinstance(source, str):
        yield _elsewhere(source, expected)
    elif file := expected.files.get(source):
        if source not in expected.present:
            yield Fault(f"mount of {source}, which does not exist")
        elif target not in _mount_points(file):
            # Under its own name in another place, a driver's file is at most superfluous. Under another name, it takes
            # the place of another file, such as /etc/ld.so.preload.
            same_name = posixpath.basename(str(target)) == posixpath.basename(file) and str(target).startswith("/")
            yield Fault(f"mount of {source} at unexpected {target!r}", not same_name)
    elif source in expected.places:
        if source not in expected.present or target != source or not {"nosuid", "nodev"} <= set(map(str, options)):
            yield Fault(f"mount of {source!r} at {target!r} with options {options}")
    elif not expected.is_harmless_node(source):
        yield _elsewhere(source, expected)
    # A device at another place would hide what the image, or the same specification, has there. Besides, each other
    # name next to VOID is a request for a device.
    elif target not in VOID if expected.is_null(source) else (target, "nodev" in options) != (source, False):
        yield Fault(f"mount of device node {source} at unexpected {target!r}", dangerous=False)
    elif source not in nodes and not expected.is_null(source):
        yield Fault(f"mount of device node {source}, which the device does not have", dangerous=False)


def _elsewhere(source: object, expected: Expectations) -> Fault:
    root = expected.driver_root or "(none)"
    # A device that does not exist gives nothing. Any other missing path may exist when a container starts.
    missing = (
        isinstance(source, str)
        and posixpath.normpath(source) == source
        and source.startswith("/dev/")
        and source not in expected.present
    )
    return Fault(f"mount of {source!r}, which is not a file of the driver root {root}", not missing)


def _mount_points(file: str) -> tuple[str, ...]:
    """Return the paths that a file of the driver root may have in containers.

    Data of the driver may be in any directory where loaders look for it.
    """
    names = (file.removeprefix(f"{each}/") for each in CONFIG_DIRECTORIES if file.startswith(f"{each}/"))
    return (f"/{file}", *(f"/{each}/{name}" for name in names for each in CONFIG_DIRECTORIES))


def hook_faults(hook: dict[str, Any], nodes: Collection[str], expected: Expectations) -> Iterator[Fault]:
    """Yield what is wrong with a hook. `nodes` is as in `mount_faults`.

    Containers need the hooks of NEEDED_HOOKS for the driver's files, and the hooks that the settings name, one of which
    limits what a container may use. So a fault of such a hook is dangerous, unless the hook can do without the part.
    """
    arguments, stage = items(hook, "args"), hook.get("hookName")
    described = f"unexpected hook {stage} {hook.get('path')} {arguments[1:2]}"
    kind = is_needed(hook, expected)
    if not kind:
        yield Fault(described, dangerous=not _is_toolkits(hook))
        return
    if stage != ("createRuntime" if kind == MEMORY_LIMITS else "createContainer"):
        yield Fault(described)
    for key in sorted(set(hook) - HOOK_KEYS):
        yield Fault(f"hook {kind} has unknown key {key}", dangerous=False)
    for setting in items(hook, "env"):
        yield from hook_variable_faults(kind, setting)
    if kind not in expected.hooks:
        for flag in flags(arguments[2:]):
            yield from flag_faults(kind, flag, nodes, expected)
    elif not re.fullmatch(_argument_pattern(kind, expected), joined := " ".join(map(str, arguments[2:]))):
        yield Fault(f"unexpected hook argument {kind} {joined}")


def is_needed(hook: dict[str, Any], expected: Expectations) -> str:
    """Return the kind of a hook that containers must have; empty for any other hook."""
    arguments = items(hook, "args")
    kind = arguments[1] if _is_toolkits(hook) and len(arguments) > 1 and isinstance(arguments[1], str) else ""
    return kind if kind in expected.hooks or (kind in NEEDED_HOOKS and expected.files) else ""


def _is_toolkits(hook: dict[str, Any]) -> bool:
    return hook.get("path") == HOOK and items(hook, "args")[:1] == [posixpath.basename(HOOK)]


def hook_variable_faults(kind: str, setting: object) -> Iterator[Fault]:
    """Yield what is wrong with an environment variable of a hook, which runs as root in the machine."""
    if setting != HOOK_VARIABLE:
        yield Fault(f"hook {kind} has unexpected environment variable {setting!r}", _loads_code(setting))


def flags(arguments: list[Any]) -> list[tuple[str, ...]]:
    """Return flags with their values; `--folder=VALUE` and `--link=VALUE` too are in two parts.

    What is not a string becomes text that is never allowed.
    """
    texts = [each if isinstance(each, str) else repr(each) for each in arguments]
    found: list[tuple[str, ...]] = []
    while texts:
        flag = texts.pop(0)
        if flag.startswith(("--folder=", "--link=")):
            name, _, value = flag.partition("=")
            found.append((name, value))
            continue
        takes_value = flag.startswith("--") and "=" not in flag and texts and not texts[0].startswith("--")
        found.append((flag, texts.pop(0)) if takes_value else (flag,))
    return found


def flag_faults(kind: str, flag: tuple[str, ...], nodes: Collection[str], expected: Expectations) -> Iterator[Fault]:
    """Yield what is wrong with a flag, and its value, of one of NEEDED_HOOKS."""
    fault = f"unexpected hook argument {kind} {' '.join(flag)}"
    match (kind, *flag):
        case ("update-ldcache", "--folder", folder):
            if folder not in expected.directories:
                yield Fault(fault, dangerous=not folder.startswith("/"))
        case ("create-symlinks", "--link", link):
            if not _link_allowed(link, nodes, expected):
                yield Fault(fault, dangerous=not _leads_to_driver(link, expected))
        case _:
            # The hook runs as root in the machine. A path might make it run or write something else there.
            yield Fault(fault, not flag[0].startswith("--") or any("/" in each or "@" in each for each in flag))


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


def _leads_to_driver(argument: str, expected: Expectations) -> bool:
    """Return whether both ends of the link `TARGET::LINK` are libraries of the driver, of whatever version."""
    target, _, link = argument.partition("::")
    ends = (posixpath.normpath(posixpath.join(posixpath.dirname(link), target)), link)
    return all(
        posixpath.dirname(each) in expected.library_directories and _stem(each) in expected.libraries for each in ends
    )


def _stem(path: str) -> str:
    return posixpath.basename(path).partition(".so")[0]


def variable_faults(setting: object, expected: Expectations) -> Iterator[Fault]:
    """Yield what is wrong with an environment variable of containers."""
    text = f"unexpected environment variable {setting!r}"
    if not isinstance(setting, str):
        yield Fault(text)
    elif not (setting in expected.environment or _is_known(setting, expected) or is_harmless(setting, expected)):
        yield Fault(text, _loads_code(setting) or bool(REQUEST.fullmatch(setting.partition("=")[0])))


def _is_known(setting: str, expected: Expectations) -> bool:
    name, _, value = setting.partition("=")
    libraries = name == "NVIDIA_CTK_LIBCUDA_DIR" and set(value.split(":")) <= expected.directories
    return setting == VOID_VARIABLE or libraries


def is_harmless(setting: str, expected: Expectations) -> bool:
    """Return whether a variable of later releases of the toolkit can do no harm: it loads no code and requests nothing.

    A variable that the settings give to pods is theirs alone.
    """
    name, separator, value = setting.partition("=")
    own = {each.partition("=")[0] for each in expected.environment}
    known = name in own or name in ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_CTK_LIBCUDA_DIR")
    plain = PLAIN.fullmatch(value) and ".so" not in value and value.lower() not in ("all", "enabled")
    named = name.startswith("NVIDIA_") and not _loads_code(name) and not REQUEST.fullmatch(name)
    return bool(separator and named and plain) and not known


def _loads_code(setting: object) -> bool:
    return not isinstance(setting, str) or bool(LOADS_CODE.fullmatch(setting.partition("=")[0].strip()))
