"""Verifies a CDI specification that nvidia-ctk generated, and leaves out what is unknown. Pure.

The format is that of specs-go/config.go of the Container Device Interface. nvidia-ctk exits with 0 even if it leaves
out all libraries, so everything is checked. One walk through the specification (Sieve) finds whatever is not expected,
and says whether it is dangerous: `verify` refuses all of it, `without_unknown` leaves out what is only unknown.
"""

import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from agent.model.device import DeviceKind, DeviceNumber
from agent.model.errors import DocumentError
from agent.model.handoff import GrantedDevice, Request
from agent.vendors.cdi import DEVICE_KEYS, items, object_of, objects, strings
from agent.vendors.cdi import devices as devices_of
from agent.vendors.machine_vendor import Verdict
from agent.vendors.nvidia import contract
from agent.vendors.nvidia.command import HOOK, NVIDIA_CTK
from agent.vendors.nvidia.contract import UUID, Instance, parse_instance

# The devices: whole GPUs and MIG devices, each with only its own nodes.
#
# nvidia-ctk names devices by index and by UUID (pkg/nvcdi/namer.go in the toolkit's source): GPUs `0` and `GPU-UUID`,
# MIG devices `0:1` and `MIG-UUID`. A GPU in MIG mode is not a device itself.


EVERY_GPU = "all"
GPU_INDEX, GPU_UUID = re.compile(r"[0-9]+"), re.compile(f"GPU-{UUID}")
MIG_INDEX, MIG_UUID = re.compile(r"[0-9]+:[0-9]+"), re.compile(f"MIG-{UUID}")
PER_GPU = frozenset({DeviceKind.GPU, DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER})

Device = tuple[str, dict[str, Any]]
"""The name and the edits of a device."""


def devices_problems(devices: list[Device], request: Request) -> Iterator[str]:
    """Yield what is wrong with the devices.

    Each GPU or MIG device must be listed twice, by index and by UUID, and the device `all` must have all their nodes.
    """
    granted = {device.path: device for device in request.devices}
    by_index: list[str] = []
    by_uuid: list[str] = []
    every: set[str] = set()
    for name, edits in devices:
        nodes = [granted[path] for path in sorted(strings(edits, "deviceNodes", "path") & set(granted))]
        yield from _foreign_nodes(name, nodes)
        own = sorted(node.path for node in nodes if node.kind == DeviceKind.GPU or _instance(node))
        if name == EVERY_GPU:
            every = set(own)
            continue
        yield from _own_problems(name, nodes)
        if GPU_INDEX.fullmatch(name) or MIG_INDEX.fullmatch(name):
            by_index.append(" ".join(own))
        elif GPU_UUID.fullmatch(name) or MIG_UUID.fullmatch(name):
            by_uuid.append(" ".join(own))
        else:
            yield f"device {name} is neither an index nor a UUID"
    if sorted(by_index) != sorted(by_uuid) or every != {path for each in by_index for path in each.split()}:
        yield f"GPUs by index {by_index}, by UUID {by_uuid} and in {EVERY_GPU!r} {sorted(every)} differ"


def _own_problems(name: str, nodes: list[GrantedDevice]) -> Iterator[str]:
    """Yield what is wrong with one device. Each must have one GPU node; MIG devices also need two capability nodes."""
    count = sum(node.kind == DeviceKind.GPU for node in nodes)
    if count != 1:
        yield f"device {name} has {count} GPU nodes, not one"
    instances = [instance for node in nodes if (instance := _instance(node))]
    if is_mig_name(name):
        if not _is_mig_device(instances):
            what = ", ".join(map(str, instances)) or "none"
            yield f"device {name} needs the capabilities of one GPU instance and one compute instance, but has {what}"
    elif instances:
        yield f"device {name} is a whole GPU, but has the MIG capability {instances[0]}"


def _foreign_nodes(name: str, nodes: list[GrantedDevice]) -> Iterator[str]:
    """Yield a problem for each node that belongs to another GPU or to no single GPU (MIG configuration, NVSwitch)."""
    gpus = {node.pci_address for node in nodes if node.kind == DeviceKind.GPU}
    for node in nodes:
        if node.kind not in PER_GPU and not _instance(node):
            yield f"device {name} has the {node.kind} node {node.path}, which does not belong to any one GPU"
        elif gpus and node.pci_address not in gpus:
            yield f"device {name} has {node.path}, which belongs to GPU {node.pci_address}"


def is_gpu_name(name: str) -> bool:
    return name == EVERY_GPU or any(each.fullmatch(name) for each in (GPU_INDEX, GPU_UUID, MIG_INDEX, MIG_UUID))


def is_mig_name(name: str) -> bool:
    return bool(MIG_INDEX.fullmatch(name) or MIG_UUID.fullmatch(name))


def is_partition(device: GrantedDevice) -> bool:
    """Return whether a granted node is the capability of a MIG instance."""
    return _instance(device) is not None


def _instance(device: GrantedDevice) -> Instance | None:
    # Without a PCI address, the capability's GPU is unknown.
    return parse_instance(device.capability) if device.pci_address else None


def _is_mig_device(instances: list[Instance]) -> bool:
    compute = [each for each in instances if each.ci is not None]
    return len(instances) == 2 and len(compute) == 1 and compute[0].gpu_instance in instances


def _served(devices: list[Device]) -> set[str]:
    return {path for _, edits in devices for path in strings(edits, "deviceNodes", "path")}


def missing_gpus(devices: list[Device], request: Request) -> tuple[str, ...]:
    """Return the PCI addresses of the granted GPUs that no device contains."""
    served = _served(devices)
    found = {
        device.pci_address for device in request.devices if device.kind == DeviceKind.GPU and device.path in served
    }
    return tuple(gpu for gpu in request.gpus if gpu not in found)


def missing_partitions(devices: list[Device], request: Request) -> dict[str, str]:
    """Return the granted MIG devices that the specification does not have, such as `gi1/ci0 of 0000:01:00.0`.

    The values are their GPUs.
    """
    served = _served(devices)
    return {
        f"{instance} of {device.pci_address}": device.pci_address
        for device in request.devices
        if (instance := _instance(device)) and instance.ci is not None and device.path not in served
    }


def without_incomplete(spec: object, request: Request) -> tuple[object, tuple[str, ...]]:
    """Return the specification without incomplete MIG devices, and the names of the removed devices.

    A MIG device is incomplete if the node of one of its two capabilities is missing: nvidia-ctk only warns if it does
    not find a node. It is also incomplete if it has a node that is not granted: NVML may list MIG devices that were
    made after the handoff. A malformed specification is returned as it is: `verify` reports it.
    """
    try:
        document = object_of(spec, "the specification")
        found = devices_of(document)
        granted = {device.path: device for device in request.devices}
        incomplete = [name for name, edits in found if is_mig_name(name) and not _is_complete(edits, granted)]
        kept = [(name, edits) for name, edits in found if name != EVERY_GPU and name not in incomplete]
        merged = _merged(edits for _, edits in kept) if incomplete else {}
    except DocumentError:
        return spec, ()
    if not incomplete:
        return spec, ()
    if kept:
        kept.append((EVERY_GPU, merged))
    listed = [{"name": name, "containerEdits": edits} for name, edits in kept]
    return document | {"devices": listed}, tuple(incomplete)


def _is_complete(edits: dict[str, Any], granted: Mapping[str, GrantedDevice]) -> bool:
    paths = strings(edits, "deviceNodes", "path")
    instances = [instance for path in paths & set(granted) if (instance := _instance(granted[path]))]
    return paths <= set(granted) and _is_mig_device(instances)


def _merged(all_edits: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the edits for the device `all` as nvidia-ctk makes them: each entry once."""
    merged: dict[str, Any] = {}
    for edits in all_edits:
        for key, value in edits.items():
            if not isinstance(value, list):
                raise DocumentError(f"{key} is not a list")
            entries = merged.setdefault(key, [])
            entries += [entry for entry in value if entry not in entries]
    return merged


# The container edits: anything that is not expected is a fault.
#
# What nvidia-ctk writes is expected (1.18 to 1.20: internal/edits, internal/discover, internal/platform-support/dgpu in
# the toolkit's source), but only for granted nodes and files. A later release may write something else. If that is
# harmless because of what it is, it is accepted: /dev/null at VOID, a mount of a node that the container gets anyway,
# data of the driver in another directory for such data, a variable that loads nothing (`is_harmless`). All else is
# either dangerous or unknown (Fault).

EDITS = frozenset({"env", "deviceNodes", "hooks", "mounts", "additionalGids"})
NODE_KEYS = frozenset({"path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"})
MOUNT_KEYS = frozenset({"hostPath", "containerPath", "options"})
MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "bind", "rprivate")
HOOK_KEYS = frozenset({"hookName", "path", "args", "env"})
DANGEROUS_KEYS = frozenset({"netDevices", "type"})
"""Unknown keys for which a specification is refused: one takes network interfaces from the machine, and only a mount
without a type, a bind mount, shows no more than its source."""
BIND_TYPES = ("none", "bind")
"""Types of a mount that say no more than the option `bind`."""
UNSAFE_OPTIONS = frozenset({"rw", "suid", "dev", "exec", "remount", "shared", "rshared", "slave", "rslave"})
"""Options that end a protection, or pass on mounts that are made later."""
VOID_VARIABLE = "NVIDIA_VISIBLE_DEVICES=void"
"""It keeps nvidia-container-runtime from adding devices to a container that already has the CDI edits: images set this
variable to `all`."""
HOOK_VARIABLE = "NVIDIA_CTK_DEBUG=false"
"""The variable that nvidia-ctk gives to each of its hooks."""
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
        self.sockets = contract.mount_points(request.sockets)
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


def node_faults(node: dict[str, Any], expected: Expectations) -> Iterator[Fault]:
    """Yield what is wrong with a device node."""
    path = node.get("path")
    if not isinstance(path, str) or path not in expected.granted:
        yield Fault(f"device node {path!r} is not granted to this machine")
        return
    if node.get("hostPath", path) != path or node.get("type", "c") != "c":
        yield Fault(f"device node {path} has unexpected fields: {node!r}")
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
    if isinstance(source, str) and source in expected.sockets:
        wanted = {"hostPath": source, "containerPath": expected.sockets[source], "options": [*contract.MOUNT_OPTIONS]}
        if mount != wanted:
            yield Fault(f"mount of {source} is {mount!r}, not {wanted!r}")
        elif source not in expected.present:
            yield Fault(f"mount of {source}, which does not exist")
        return
    yield from _source_faults(source, mount.get("containerPath"), options, nodes, expected)
    if "ro" not in options:
        yield Fault(f"mount of {source!r} is not read-only")


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
    # Data of the driver may be in any directory where loaders look for it.
    names = (file.removeprefix(f"{each}/") for each in CONFIG_DIRECTORIES if file.startswith(f"{each}/"))
    return (f"/{file}", *(f"/{each}/{name}" for name in names for each in CONFIG_DIRECTORIES))


def hook_faults(hook: dict[str, Any], kind: str, expected: Expectations) -> Iterator[Fault]:
    """Yield what is wrong with a hook, except in its variables and flags. `kind` is from `is_needed`.

    Containers need the hooks of NEEDED_HOOKS for the driver's files, and the hooks that the settings name, one of which
    limits what a container may use. So a fault of such a hook is dangerous, unless the hook can do without the part.
    """
    arguments, stage = items(hook, "args"), hook.get("hookName")
    described = f"unexpected hook {stage} {hook.get('path')} {arguments[1:2]}"
    if not kind:
        yield Fault(described, dangerous=not _is_toolkits(hook))
    elif stage != ("createRuntime" if kind == MEMORY_LIMITS else "createContainer"):
        yield Fault(described)
    joined = " ".join(map(str, arguments[2:]))
    if kind in expected.hooks and not re.fullmatch(_argument_pattern(kind, expected), joined):
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


def is_harmless(setting: object, expected: Expectations) -> bool:
    """Return whether a variable of later releases of the toolkit can do no harm: it loads no code and requests nothing.

    A variable that the settings give to pods is theirs alone.
    """
    if not isinstance(setting, str):
        return False
    name, separator, value = setting.partition("=")
    own = {each.partition("=")[0] for each in expected.environment}
    known = name in own or name in ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_CTK_LIBCUDA_DIR")
    plain = PLAIN.fullmatch(value) and ".so" not in value and value.lower() not in ("all", "enabled")
    named = name.startswith("NVIDIA_") and not _loads_code(name) and not REQUEST.fullmatch(name)
    return bool(separator and named and plain) and not known


def _loads_code(setting: object) -> bool:
    return not isinstance(setting, str) or bool(LOADS_CODE.fullmatch(setting.partition("=")[0].strip()))


KIND = "nvidia.com/gpu"
NO_GPU = "none"
"""A device with the driver's files and the nodes that all GPUs share, but no GPU. Many images set
NVIDIA_VISIBLE_DEVICES=none. For their containers, nvidia-container-runtime in mode cdi requests this device, and if the
device did not exist, the containers would not start. The agent adds the device, because `nvidia-ctk cdi generate` does
not make it if there are GPUs."""
NO_GPU_EDITS = {"env": ["NVCT_EMPTY_DEVICE="]}
"""The edits of NO_GPU, as in the specifications that nvidia-ctk makes in memory (lib-nvml.go). At least one edit
is needed, because a CDI device without any edits is invalid."""

DOCUMENT_KEYS = frozenset({"cdiVersion", "kind", "devices", "containerEdits"})
COMMON = frozenset({DeviceKind.CONTROL, DeviceKind.UVM})
"""Kinds of nodes without which no GPU can compute."""
SHARED = COMMON | {DeviceKind.UVM_TOOLS, DeviceKind.MODESET}
"""Kinds of nodes that nvidia-ctk gives to every container (common-nvml.go). Alone, they give access to no GPU."""
NEEDED_LIBRARIES = ("libcuda.so", "libnvidia-ml.so")


def verify(spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]) -> Verdict:
    """Verify a specification against one request. `live` also has the numbers of nodes that it mounts.

    If the specification is malformed, the verdict has a single problem, which names the malformed part.
    """
    try:
        document = object_of(spec, "the specification")
        common = object_of(document.get("containerEdits", {}), "containerEdits")
        devices = devices_of(document)
        no_gpu = {"name": NO_GPU, "containerEdits": NO_GPU_EDITS}
        listed = [each for each in objects(document, "devices") if each != no_gpu]
        problems = [
            *specification_problems(document | {"devices": listed}, KIND, Expectations(request, live, present)),
            *_common_problems(common, request),
            *library_problems(common, request),
            *_environment_problems(common, request),
            *devices_problems([(each["name"], each["containerEdits"]) for each in listed], request),
        ]
        missing = missing_gpus(devices, request)
    except DocumentError as error:
        return Verdict(problems=(error.message,))
    if not problems and len(missing) == len(request.gpus):
        problems.append("no device in it is a granted GPU")
    return Verdict(
        tuple(problems),
        missing,
        _left_out(common, devices, request),
        tuple(name for name, _ in devices),
        missing_partitions(devices, request),
    )


def _left_out(common: dict[str, Any], devices: list[Device], request: Request) -> tuple[str, ...]:
    """Return the files of the driver root, and the granted nodes, that no container gets.

    GPU nodes and nodes of MIG capabilities are not returned, because `verify` lists their GPUs and MIG devices as
    missing.
    """
    mounted = strings(common, "mounts", "hostPath")
    nodes = _served([("", common), *devices])
    files = (file.target for file in request.files if not file.link)
    return (
        *sorted(file for file in files if f"{request.driver_root}/{file}" not in mounted),
        *sorted(
            device.path
            for device in request.devices
            if device.path not in nodes and device.kind != DeviceKind.GPU and not is_partition(device)
        ),
    )


def specification_problems(document: dict[str, Any], kind: str, expected: Expectations) -> Iterator[str]:
    """Yield whatever is not expected in a specification whose devices must be of this kind. Raises DocumentError."""
    if document.get("kind") != kind:
        yield f"kind is {document.get('kind')!r}, not {kind}"
    if not isinstance(document.get("cdiVersion"), str):
        yield "cdiVersion is missing"
    sieve = Sieve(expected)
    sieve.document(document)
    yield from sieve.problems


def _common_problems(common: dict[str, Any], request: Request) -> Iterator[str]:
    present = strings(common, "deviceNodes", "path")
    kinds = {device.path: device.kind for device in request.devices}
    for kind in sorted(COMMON - {kinds.get(path) for path in present}):
        yield f"no {kind} node, without which no container can compute"
    for path in sorted(path for path, kind in kinds.items() if kind in COMMON and path not in present):
        yield f"device node {path} is not in it"
    for path in sorted(path for path in present if path in kinds and kinds[path] not in SHARED):
        yield f"every container would get the {kinds[path]} node {path}"


def _environment_problems(common: dict[str, Any], request: Request) -> Iterator[str]:
    """Yield a problem for each requested variable that is missing. (The Sieve refuses unexpected ones.)"""
    present = items(common, "env")
    for variable in request.environment:
        if f"{variable.name}={variable.value}" not in present:
            yield f"environment variable {variable.name} is not set to {variable.value!r}"
    if VOID_VARIABLE not in present:
        yield f"environment variable {VOID_VARIABLE} is not in it, so a pod could get other GPUs of the machine"


def library_problems(common: dict[str, Any], request: Request) -> Iterator[str]:
    """Yield a problem for each missing library, and if the loader in containers would not find libcuda.

    Two sets of libraries must not be missing: NEEDED_LIBRARIES, and the native libraries in the driver root whose names
    end in the driver's version.
    """
    mounted = strings(common, "mounts", "hostPath")
    names = [posixpath.basename(path) for path in mounted]
    for library in NEEDED_LIBRARIES:
        if not any(name.startswith(f"{library}.") for name in names):
            yield f"{library} is not in it"
    native = [
        posixpath.dirname(file.target)
        for file in request.files
        if posixpath.basename(file.target) == f"libcuda.so.{request.driver_version}" and "i386" not in file.target
    ]
    for file in request.files:
        directory = posixpath.dirname(file.target)
        belongs = any(directory in (each, f"{each}/vdpau") for each in native)
        versioned = file.target.endswith(f".so.{request.driver_version}")
        if belongs and versioned and not file.link and f"{request.driver_root}/{file.target}" not in mounted:
            yield f"library {file.target} is not in it"
    listed = {flag for hook in objects(common, "hooks") for flag in flags(items(hook, "args")[2:])}
    for directory in native:
        if ("--folder", f"/{directory}") not in listed:
            yield f"no hook adds /{directory} to the loader's cache of containers"


# The walk through a specification, and what a later nvidia-ctk may write: unknown, but not dangerous.
#
# What is dangerous stays, so that `verify` refuses the specification and names it. What is left depends on the part:
#
# - An unknown key of the specification, of a device, a node, a mount or a hook is left out, and the rest stays: the
#   rest alone gives a container no more than was granted, even if the key would have restricted it; and without the
#   node, the mount or the hook, a container could not use its GPU. Besides, runtimes refuse a specification with a key
#   that they do not know. Of a mount's options, and of the flags and variables of a hook that containers need, only the
#   unknown ones are left out, for the same reasons.
# - Any other unknown part is left out as a whole: a mount, a hook, a variable, a device under a new kind of name.
#
# `verify` then finds out whether something needed is missing.


Part = TypeVar("Part")


class Kept(NamedTuple):
    """What is left of a specification."""

    spec: object
    left_out: tuple[str, ...] = ()
    """What was left out, in words."""
    harmless: tuple[str, ...] = ()
    """What is new and stays because it is harmless, in words."""


def without_unknown(spec: object, expected: Expectations, is_device: Callable[[str], bool] = lambda name: True) -> Kept:
    """Return the specification without its unknown parts. If it is malformed, it is returned as it is.

    `is_device` says whether a device's name is of a known kind.
    """
    sieve = Sieve(expected, is_device)
    try:
        return Kept(sieve.document(object_of(spec, "the specification")), tuple(sieve.left_out), tuple(sieve.harmless))
    except DocumentError:
        # `verify` reports it.
        return Kept(spec)


def remark_on(harmless: Iterable[str]) -> str:
    """Return the remark on what is new and stays."""
    return f"{NVIDIA_CTK} adds what this agent knows to be harmless: {', '.join(harmless)}"


class Sieve:
    """Walks through a specification, takes down what is not expected, and keeps all but the unknown parts."""

    def __init__(self, expected: Expectations, is_device: Callable[[str], bool] = lambda name: True) -> None:
        self.problems: list[str] = []
        """All faults, each with its place."""
        self.left_out: dict[str, None] = {}
        """The faults of the parts that were left out. The same part in several devices is named once."""
        self.harmless: dict[str, None] = {}
        self._expected = expected
        self._is_device = is_device
        self._where = ""
        self._dangers = 0

    def document(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the specification without its unknown parts. Raises DocumentError if it is malformed."""
        kept = self._known(document, DOCUMENT_KEYS, " of the specification")
        if "containerEdits" in kept:
            common = object_of(kept["containerEdits"], "containerEdits")
            kept["containerEdits"] = self._edits("containerEdits", common)
        kept["devices"] = [each for device in objects(kept, "devices") if (each := self._device(device))]
        return kept

    def _device(self, device: dict[str, Any]) -> dict[str, Any] | None:
        self._where, before = "", self._dangers
        kept = self._known(device, DEVICE_KEYS, " of a device")
        if not isinstance(name := kept.get("name"), str):
            raise DocumentError("a device has no name")
        edits = object_of(kept.get("containerEdits"), "containerEdits")
        kept["containerEdits"] = self._edits(f"device {name}", edits)
        # With dangerous edits, the device stays, so that `verify` names them.
        unknown = () if self._is_device(name) else (Fault(f"device {name}", dangerous=self._dangers > before),)
        return kept if self._stays(unknown) else None

    def _edits(self, where: str, edits: dict[str, Any]) -> dict[str, Any]:
        self._where, expected, nodes = where, self._expected, strings(edits, "deviceNodes", "path")
        kept = self._known(edits, EDITS)
        found: dict[str, list[Any]] = {
            "deviceNodes": [each for node in objects(kept, "deviceNodes") if (each := self._node(node))],
            "mounts": [each for mount in objects(kept, "mounts") if (each := self._mount(mount, nodes))],
            "hooks": [each for hook in objects(kept, "hooks") if (each := self._hook(hook, nodes))],
            "env": self._sifted(items(kept, "env"), lambda setting: variable_faults(setting, expected)),
        }
        groups = {number.gid for path, number in expected.live.items() if path in expected.granted} - {0}
        for gid in items(kept, "additionalGids"):
            if type(gid) is not int or gid not in groups:
                self._stays((Fault(f"additional group {gid!r}, which no granted device node has"),))
        mounted = sorted(strings(found, "mounts", "hostPath"))
        self.harmless |= dict.fromkeys(f"mount of {path}" for path in mounted if expected.is_harmless_node(path))
        self.harmless |= dict.fromkeys(
            each for each in found["env"] if isinstance(each, str) and is_harmless(each, expected)
        )
        return kept | {key: value for key, value in found.items() if key in kept}

    def _node(self, node: dict[str, Any]) -> dict[str, Any] | None:
        kept = self._known(node, NODE_KEYS, f" of device node {node.get('path')}")
        return kept if self._stays(node_faults(kept, self._expected)) else None

    def _mount(self, mount: dict[str, Any], nodes: set[str]) -> dict[str, Any] | None:
        what = f"mount of {mount.get('hostPath')!r}"
        kept = {key: value for key, value in mount.items() if key != "type" or value not in BIND_TYPES}
        kept = self._known(kept, MOUNT_KEYS, f" of {what}")
        # The options of a socket's mount are others, and `mount_faults` compares them.
        if "options" in kept and kept.get("hostPath") not in (*self._expected.sockets,):
            kept["options"] = self._sifted(items(kept, "options"), lambda option: option_faults(what, option))
        return kept if self._stays(mount_faults(kept, nodes, self._expected)) else None

    def _hook(self, hook: dict[str, Any], nodes: set[str]) -> dict[str, Any] | None:
        """Return the hook without its unknown parts, if containers need it; otherwise, return it as it is."""
        expected, kind, kept = self._expected, is_needed(hook, self._expected), hook
        if kind:
            kept = self._known(hook, HOOK_KEYS, f" of hook {kind}")
            if "env" in kept:
                kept["env"] = self._sifted(items(kept, "env"), lambda setting: hook_variable_faults(kind, setting))
        if kind and kind not in expected.hooks:
            name, rest = items(kept, "args")[:2], items(kept, "args")[2:]
            sifted = self._sifted(flags(rest), lambda flag: flag_faults(kind, flag, nodes, expected))
            kept["args"] = [*name, *(each for flag in sifted for each in flag)]
        return kept if self._stays(hook_faults(kept, kind, expected)) else None

    def _known(self, part: dict[str, Any], keys: frozenset[str], of: str = "") -> dict[str, Any]:
        """Return the object without unknown keys. `of` ends the messages, and names the object."""

        def faults(key: str) -> Iterator[Fault]:
            if key not in keys:
                yield Fault(f"unknown key {key}{of}", key in DANGEROUS_KEYS)

        return {key: part[key] for key in self._sifted(part, faults)}

    def _sifted(self, parts: Iterable[Part], faults: Callable[[Part], Iterable[Fault]]) -> list[Part]:
        return [part for part in parts if self._stays(faults(part))]

    def _stays(self, faults: Iterable[Fault]) -> bool:
        """Take down a part's faults. Return whether the part has none, or a dangerous one."""
        found = list(faults)
        self.problems += [f"{self._where}: {each.text}" if self._where else each.text for each in found]
        dangers = sum(each.dangerous for each in found)
        self._dangers += dangers
        if found and not dangers:
            self.left_out |= dict.fromkeys(each.text for each in found)
        return not found or dangers > 0
