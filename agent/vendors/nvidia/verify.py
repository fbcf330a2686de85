"""Verifies a CDI specification that nvidia-ctk generated, and leaves out what is unknown. Pure.

The format is that of specs-go/config.go of the Container Device Interface. nvidia-ctk exits with 0 even if it leaves
out all libraries, so everything is checked. One walk through the specification (Sieve) finds whatever is not expected,
and says whether it is dangerous: `verify` refuses all of it, `Sieve.sift` leaves out what is only unknown.
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
from agent.vendors.nvidia.contract import HOOK, SHARED, UUID, Instance, parse_instance

# The devices: whole GPUs and MIG devices, each with only its own nodes.
#
# nvidia-ctk names devices by index and by UUID (pkg/nvcdi/namer.go in the toolkit's source): GPUs `0` and `GPU-UUID`,
# MIG devices `0:1` and `MIG-UUID`. A GPU in MIG mode is not a device itself.

EVERY_GPU = "all"
BY_INDEX = re.compile(r"[0-9]+(?::[0-9]+)?")
BY_UUID = re.compile(f"(?:GPU|MIG)-{UUID}")
MIG_NAME = re.compile(f"[0-9]+:[0-9]+|MIG-{UUID}")
PER_GPU = frozenset({DeviceKind.GPU, DeviceKind.DRI_CARD, DeviceKind.DRI_RENDER})


def is_gpu_name(name: str) -> bool:
    return name == EVERY_GPU or any(each.fullmatch(name) for each in (BY_INDEX, BY_UUID))


def instance_of(node: GrantedDevice) -> Instance | None:
    """Return the MIG instance whose capability the node is. Without a PCI address, the capability is of no GPU."""
    return parse_instance(node.capability) if node.pci_address else None


class Device(NamedTuple):
    """A device of a specification."""

    name: str
    edits: dict[str, Any]
    nodes: tuple[GrantedDevice, ...]
    """Those of its nodes that are granted, by path."""

    @property
    def gpus(self) -> list[str]:
        return [node.pci_address for node in self.nodes if node.kind == DeviceKind.GPU]

    @property
    def instances(self) -> list[Instance]:
        return [instance for node in self.nodes if (instance := instance_of(node))]

    @property
    def is_mig(self) -> bool:
        return bool(MIG_NAME.fullmatch(self.name))

    @property
    def is_one_partition(self) -> bool:
        """Whether it has the capabilities of one compute instance and of its GPU instance, and no others."""
        instances = self.instances
        compute = [each for each in instances if each.ci is not None]
        return len(instances) == 2 and len(compute) == 1 and compute[0].gpu_instance in instances


def devices(document: dict[str, Any], request: Request) -> list[Device]:
    """Return the devices of a specification. Raises DocumentError if it is malformed."""
    granted = {node.path: node for node in request.devices}
    return [
        Device(name, edits, tuple(granted[path] for path in sorted(_paths(edits) & granted.keys())))
        for name, edits in devices_of(document)
    ]


def _paths(edits: dict[str, Any]) -> set[str]:
    return strings(edits, "deviceNodes", "path")


def devices_problems(listed: list[Device]) -> Iterator[str]:
    """Yield what is wrong with the devices.

    Each GPU or MIG device must be listed twice, by index and by UUID, and the device `all` must have all their nodes.
    """
    by_index: list[str] = []
    by_uuid: list[str] = []
    every: set[str] = set()
    for device in listed:
        yield from _node_problems(device)
        own = " ".join(node.path for node in device.nodes if node.kind == DeviceKind.GPU or instance_of(node))
        if device.name == EVERY_GPU:
            every = set(own.split())
        elif BY_INDEX.fullmatch(device.name):
            by_index.append(own)
        elif BY_UUID.fullmatch(device.name):
            by_uuid.append(own)
        else:
            yield f"device {device.name} is neither an index nor a UUID"
    if sorted(by_index) != sorted(by_uuid) or every != {path for each in by_index for path in each.split()}:
        yield f"GPUs by index {by_index}, by UUID {by_uuid} and in {EVERY_GPU!r} {sorted(every)} differ"


def _node_problems(device: Device) -> Iterator[str]:
    name, gpus, instances = device.name, device.gpus, device.instances
    for node in device.nodes:
        # MIG's configuration and NVSwitch reach several GPUs.
        if node.kind not in PER_GPU and not instance_of(node):
            yield f"device {name} has the {node.kind} node {node.path}, which does not belong to any one GPU"
        elif gpus and node.pci_address not in gpus:
            yield f"device {name} has {node.path}, which belongs to GPU {node.pci_address}"
    if name == EVERY_GPU:
        return
    if len(gpus) != 1:
        yield f"device {name} has {len(gpus)} GPU nodes, not one"
    if device.is_mig and not device.is_one_partition:
        what = ", ".join(map(str, instances)) or "none"
        yield f"device {name} needs the capabilities of one GPU instance and one compute instance, but has {what}"
    elif instances and not device.is_mig:
        yield f"device {name} is a whole GPU, but has the MIG capability {instances[0]}"


def missing_gpus(listed: list[Device], request: Request) -> tuple[str, ...]:
    """Return the PCI addresses of the granted GPUs that no device contains."""
    found = {gpu for device in listed for gpu in device.gpus}
    return tuple(gpu for gpu in request.gpus if gpu not in found)


def without_incomplete(document: dict[str, Any], request: Request) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the specification without incomplete MIG devices, and their names. Raises DocumentError.

    A MIG device is incomplete if the node of one of its two capabilities is missing: nvidia-ctk only warns if it does
    not find a node. It is also incomplete if it has a node that is not granted: NVML may list MIG devices that were
    made after the handoff.
    """
    found = devices(document, request)
    partitions = [each for each in found if each.is_one_partition and len(each.nodes) == len(_paths(each.edits))]
    incomplete = tuple(each.name for each in found if each.is_mig and each not in partitions)
    if not incomplete:
        return document, ()
    kept = {each.name: each.edits for each in found if each.name not in (EVERY_GPU, *incomplete)}
    # As nvidia-ctk makes it: each entry once.
    every: dict[str, list[Any]] = {}
    for edits in kept.values():
        for key in edits:
            entries = every.setdefault(key, [])
            entries += [entry for entry in items(edits, key) if entry not in entries]
    if kept:
        kept[EVERY_GPU] = every
    return document | {"devices": [{"name": name, "containerEdits": edits} for name, edits in kept.items()]}, incomplete


# The container edits: anything that is not expected is a fault.
#
# What nvidia-ctk writes is expected (1.18 to 1.20: internal/edits, internal/discover, internal/platform-support/dgpu in
# the toolkit's source), but only for granted nodes and files. A later release may write something else. If that is
# harmless because of what it is, it is accepted: /dev/null at VOID, a mount of a node that the container gets anyway,
# data of the driver in another directory for such data, a variable that loads nothing. All else is either dangerous or
# unknown (Fault).

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
OTHER_HOOKS: Mapping[str, str] = {
    "enable-cuda-compat": "(--host-driver-version={version})?",
    "disable-device-node-modification": "",
    "update-application-profile": "",
    MEMORY_LIMITS: "--driver-root {root}( --gpu-id (GPU|MIG)-[0-9a-f-]{{36}})+",
}
"""Patterns of the arguments, joined by spaces, of the hooks that settings can ask for, as nvidia-ctk writes them
(internal/discover in the toolkit's source: hooks.go, compat_libs.go)."""


class Fault(NamedTuple):
    """Something in a specification that is not expected."""

    text: str
    dangerous: bool = True
    """Whether the specification must be refused: with this part, a container would get more than it should, or code of
    others; or without it, a container could not use its GPU. Otherwise the part is only unknown, and the specification
    can be published without it."""


Part = TypeVar("Part")


class Sieve:
    """Walks through a specification, takes down what is not expected, and keeps all but the unknown parts.

    What is dangerous stays, so that `verify` refuses the specification and names it. What is left depends on the part:

    - An unknown key of the specification, of a device, a node, a mount or a hook is left out, and the rest stays: the
      rest alone gives a container no more than was granted, even if the key would have restricted it; and without the
      node, the mount or the hook, a container could not use its GPU. Besides, runtimes refuse a specification with a
      key that they do not know. Of a mount's options, and of the flags and variables of a hook that containers need,
      only the unknown ones are left out, for the same reasons.
    - Any other unknown part is left out as a whole: a mount, a hook, a variable, a device under a new kind of name.

    `verify` then finds out whether something needed is missing.
    """

    def __init__(
        self,
        request: Request,
        live: Mapping[str, DeviceNumber],
        present: Collection[str],
        places: Collection[str] = (),
        is_device: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Prepare the walk. The sets are made once, because a specification has hundreds of entries to compare.

        `live` and `present` are as in MachineVendor.verify. `places` are paths other than the driver's files that may
        be mounted if they exist. `is_device` says whether a device's name is of a known kind.
        """
        self.problems: list[str] = []
        """All faults, each with its place."""
        self.left_out: dict[str, None] = {}
        """The faults of the parts that were left out. The same part in several devices is named once."""
        self.harmless: dict[str, None] = {}
        """What is new and stays because it is harmless, in words."""
        self._request, self._live, self._present = request, live, present
        self._places, self._is_device = places, is_device
        self._where, self._dangers = "", 0
        self._granted = {device.path: (device.major, device.minor) for device in request.devices}
        self._drm = {(device.path, device.kind, device.pci_address) for device in request.devices}
        targets, root = [file.target for file in request.files], request.driver_root
        self._files = {f"{root}/{target}": target for target in targets} if root else {}
        self._variables = {f"{each.name}={each.value}" for each in request.environment}
        self._hooks = OTHER_HOOKS.keys() & set(request.cdi_hooks)
        self._sockets = contract.mount_points(request.sockets)
        # Directories of the driver's files as containers see them, and names of its libraries up to `.so`.
        libraries = [target for target in targets if ".so" in target]
        self._directories = {f"/{posixpath.dirname(target)}" for target in targets}
        self._library_directories = {f"/{posixpath.dirname(target)}" for target in libraries}
        self._libraries = {_stem(target) for target in libraries}
        self._links = {f"/{file.target}" for file in request.files if file.link} | {
            posixpath.join(directory, name) for directory in self._library_directories for name in MADE_LINKS
        }

    def check(self, document: dict[str, Any], kind: str) -> list[str]:
        """Return whatever is not expected in a specification, which must be of this kind. Raises DocumentError."""
        if document.get("kind") != kind:
            self.problems.append(f"kind is {document.get('kind')!r}, not {kind}")
        if not isinstance(document.get("cdiVersion"), str):
            self.problems.append("cdiVersion is missing")
        self.sift(document)
        return self.problems

    def sift(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the specification without its unknown parts. Raises DocumentError."""
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
        self._where, nodes = where, _paths(edits)
        kept = self._known(edits, EDITS)
        found: dict[str, list[Any]] = {
            "deviceNodes": [each for node in objects(kept, "deviceNodes") if (each := self._node(node))],
            "mounts": [each for mount in objects(kept, "mounts") if (each := self._mount(mount, nodes))],
            "hooks": [each for hook in objects(kept, "hooks") if (each := self._hook(hook, nodes))],
            "env": self._sifted(items(kept, "env"), self._variable_faults),
        }
        groups = {number.gid for path, number in self._live.items() if path in self._granted} - {0}
        for gid in items(kept, "additionalGids"):
            if type(gid) is not int or gid not in groups:
                self._stays((Fault(f"additional group {gid!r}, which no granted device node has"),))
        # Keys that are empty now are dropped: a mode's specification may not have all of them.
        return {key: found.get(key, value) for key, value in kept.items() if found.get(key, True)}

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

    # Nodes

    def _node(self, node: dict[str, Any]) -> dict[str, Any] | None:
        kept = self._known(node, NODE_KEYS, f" of device node {node.get('path')}")
        return kept if self._stays(self._node_faults(kept)) else None

    def _node_faults(self, node: dict[str, Any]) -> Iterator[Fault]:
        path = node.get("path")
        if not isinstance(path, str) or path not in self._granted:
            yield Fault(f"device node {path!r} is not granted to this machine")
            return
        if node.get("hostPath", path) != path or node.get("type", "c") != "c":
            yield Fault(f"device node {path} has unexpected fields: {node!r}")
        if node.get("permissions") not in PERMISSIONS:
            yield Fault(f"device node {path} has permissions {node['permissions']!r}, not rw or rwm")
        number = self._live.get(path)
        if number is None:
            yield Fault(f"device node {path} is not in this machine")
            return
        live_number = f"{number.major}:{number.minor}"
        if (number.major, number.minor) != self._granted[path]:
            major, minor = self._granted[path]
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

    # Mounts

    def _mount(self, mount: dict[str, Any], nodes: set[str]) -> dict[str, Any] | None:
        """Return the mount without its unknown parts. `nodes` has the paths of the nodes in the same edits."""
        source = mount.get("hostPath")
        what = f"mount of {source!r}"
        kept = {key: value for key, value in mount.items() if key != "type" or value not in BIND_TYPES}
        kept = self._known(kept, MOUNT_KEYS, f" of {what}")
        if isinstance(source, str) and source in self._sockets:
            return kept if self._stays(self._socket_faults(kept, source)) else None

        def option_faults(option: object) -> Iterator[Fault]:
            if option not in MOUNT_OPTIONS:
                dangerous = not isinstance(option, str) or "=" in option or option in UNSAFE_OPTIONS
                yield Fault(f"{what} has unexpected option {option!r}", dangerous)

        if "options" in kept:
            kept["options"] = self._sifted(items(kept, "options"), option_faults)
        options = items(kept, "options")
        faults = [*self._source_faults(source, kept.get("containerPath"), options, nodes)]
        if "ro" not in options:
            faults.append(Fault(f"{what} is not read-only"))
        return kept if self._stays(faults) else None

    def _socket_faults(self, mount: dict[str, Any], source: str) -> Iterator[Fault]:
        wanted = {"hostPath": source, "containerPath": self._sockets[source], "options": [*contract.MOUNT_OPTIONS]}
        if mount != wanted:
            yield Fault(f"mount of {source} is {mount!r}, not {wanted!r}")
        elif source not in self._present:
            yield Fault(f"mount of {source}, which does not exist")

    def _source_faults(self, source: object, target: object, options: list[Any], nodes: set[str]) -> Iterator[Fault]:
        exists = isinstance(source, str) and source in self._present
        number = self._live.get(source) if isinstance(source, str) else None
        if isinstance(source, str) and (file := self._files.get(source)):
            # Data of the driver may be in any directory where loaders look for it.
            names = (file.removeprefix(f"{each}/") for each in CONFIG_DIRECTORIES if file.startswith(f"{each}/"))
            if not exists:
                yield Fault(f"mount of {source}, which does not exist")
            elif target not in (f"/{file}", *(f"/{each}/{name}" for name in names for each in CONFIG_DIRECTORIES)):
                # Under its own name in another place, a driver's file is at most superfluous. Under another name, it
                # takes the place of another file, such as /etc/ld.so.preload.
                same_name = posixpath.basename(str(target)) == posixpath.basename(file) and str(target).startswith("/")
                yield Fault(f"mount of {source} at unexpected {target!r}", not same_name)
        elif source in self._places:
            if not exists or target != source or not {"nosuid", "nodev"} <= set(map(str, options)):
                yield Fault(f"mount of {source!r} at {target!r} with options {options}")
        elif number and (source in self._granted or (number.major, number.minor) == NULL):
            # A device at another place would hide what the image, or the same specification, has there. Besides, each
            # other name next to VOID is a request for a device.
            granted = source in self._granted
            if (target, "nodev" in options) != (source, False) if granted else target not in VOID:
                yield Fault(f"mount of device node {source} at unexpected {target!r}", dangerous=False)
            elif granted and source not in nodes:
                yield Fault(f"mount of device node {source}, which the device does not have", dangerous=False)
            else:
                self.harmless[f"mount of {source}"] = None
        else:
            # A device that does not exist gives nothing. Any other missing path may exist when a container starts.
            nothing = isinstance(source, str) and posixpath.normpath(source) == source and source.startswith("/dev/")
            root = self._request.driver_root or "(none)"
            yield Fault(f"mount of {source!r}, which is not a file of the driver root {root}", not nothing or exists)

    # Hooks

    def _hook(self, hook: dict[str, Any], nodes: set[str]) -> dict[str, Any] | None:
        """Return the hook without its unknown parts, if containers need it; otherwise, return it as it is.

        Containers need the hooks of NEEDED_HOOKS for the driver's files, and the hooks that the settings name, one of
        which limits what a container may use. So a fault of such a hook is dangerous, unless the hook can do without
        the part.
        """
        arguments, stage = items(hook, "args"), hook.get("hookName")
        toolkits = hook.get("path") == HOOK and arguments[:1] == [posixpath.basename(HOOK)]
        kind = arguments[1] if toolkits and len(arguments) > 1 and isinstance(arguments[1], str) else ""
        needed = kind in NEEDED_HOOKS and bool(self._files)
        if not needed and kind not in self._hooks:
            unexpected = Fault(f"unexpected hook {stage} {hook.get('path')} {arguments[1:2]}", not toolkits)
            return hook if self._stays((unexpected,)) else None
        kept = self._known(hook, HOOK_KEYS, f" of hook {kind}")

        def variable_faults(setting: object) -> Iterator[Fault]:
            # The hook runs as root in the machine.
            if setting != HOOK_VARIABLE:
                yield Fault(f"hook {kind} has unexpected environment variable {setting!r}", _loads_code(setting))

        if "env" in kept:
            kept["env"] = self._sifted(items(kept, "env"), variable_faults)
        faults = []
        if kind not in self._hooks:
            sifted = self._sifted(flags(arguments[2:]), lambda flag: self._flag_faults(kind, flag, nodes))
            kept["args"] = [*arguments[:2], *(each for flag in sifted for each in flag)]
        if stage != ("createRuntime" if kind == MEMORY_LIMITS else "createContainer"):
            faults.append(Fault(f"unexpected hook {stage} {hook.get('path')} {arguments[1:2]}"))
        if kind in self._hooks:
            joined, request = " ".join(map(str, arguments[2:])), self._request
            version, root = re.escape(request.driver_version), re.escape(request.driver_root)
            if not re.fullmatch(OTHER_HOOKS[kind].format(version=version, root=root), joined):
                faults.append(Fault(f"unexpected hook argument {kind} {joined}"))
        return kept if self._stays(faults) else None

    def _flag_faults(self, kind: str, flag: tuple[str, ...], nodes: set[str]) -> Iterator[Fault]:
        fault = f"unexpected hook argument {kind} {' '.join(flag)}"
        match (kind, *flag):
            case ("update-ldcache", "--folder", folder):
                if folder not in self._directories:
                    yield Fault(fault, dangerous=not folder.startswith("/"))
            case ("create-symlinks", "--link", link):
                yield from self._link_faults(fault, link, nodes)
            case _:
                # The hook runs as root in the machine. A path might make it run or write something else there.
                yield Fault(fault, not flag[0].startswith("--") or any("/" in each or "@" in each for each in flag))

    def _link_faults(self, fault: str, argument: str, nodes: set[str]) -> Iterator[Fault]:
        """Yield what is wrong with the link that `argument` describes: `TARGET::LINK`.

        `nodes` has the paths of the nodes in the same edits. A link in /dev/dri/by-path must lead to a granted DRM node
        whose path is in `nodes`. Any other link must be one of the driver root's links or of MADE_LINKS, and must lead
        into a directory with driver libraries. If both ends are libraries of the driver, of whatever version, the link
        is not dangerous.
        """
        target, separator, link = argument.partition("::")
        leads_to = posixpath.normpath(posixpath.join(posixpath.dirname(link), target))
        if not separator or not target or posixpath.normpath(link) != link:
            allowed = False
        elif by_path := BY_PATH.fullmatch(link):
            wanted = (leads_to, f"dri-{by_path['kind']}", by_path["address"].lower())
            allowed = leads_to in nodes and wanted in self._drm
        else:
            allowed = link in self._links and posixpath.dirname(leads_to) in self._library_directories
        if not allowed:
            libraries = all(
                posixpath.dirname(each) in self._library_directories and _stem(each) in self._libraries
                for each in (leads_to, link)
            )
            yield Fault(fault, dangerous=not libraries)

    # Variables of containers

    def _variable_faults(self, setting: object) -> Iterator[Fault]:
        text = f"unexpected environment variable {setting!r}"
        if not isinstance(setting, str):
            yield Fault(text)
            return
        name, _, value = setting.partition("=")
        libraries = name == "NVIDIA_CTK_LIBCUDA_DIR" and set(value.split(":")) <= self._directories
        if setting in self._variables or setting == VOID_VARIABLE or libraries:
            return
        if self._is_harmless_variable(setting):
            self.harmless[setting] = None
        else:
            yield Fault(text, _loads_code(setting) or bool(REQUEST.fullmatch(name)))

    def _is_harmless_variable(self, setting: str) -> bool:
        """Return whether a variable of later releases of the toolkit loads no code and requests nothing.

        A variable that the settings give to pods is theirs alone.
        """
        name, separator, value = setting.partition("=")
        own = {each.name for each in self._request.environment}
        known = name in own or name in ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_CTK_LIBCUDA_DIR")
        plain = PLAIN.fullmatch(value) and ".so" not in value and value.lower() not in ("all", "enabled")
        named = name.startswith("NVIDIA_") and not _loads_code(name) and not REQUEST.fullmatch(name)
        return bool(separator and named and plain) and not known


def flags(arguments: list[Any]) -> list[tuple[str, ...]]:
    """Return flags with their values; `--folder=VALUE` and `--link=VALUE` too are in two parts.

    What is not a string becomes text that is never allowed.
    """
    texts = [each if isinstance(each, str) else repr(each) for each in reversed(arguments)]
    found: list[tuple[str, ...]] = []
    while texts:
        flag = texts.pop()
        if flag.startswith(("--folder=", "--link=")):
            name, _, value = flag.partition("=")
            found.append((name, value))
            continue
        takes_value = flag.startswith("--") and "=" not in flag and texts and not texts[-1].startswith("--")
        found.append((flag, texts.pop()) if takes_value else (flag,))
    return found


def _stem(path: str) -> str:
    return posixpath.basename(path).partition(".so")[0]


def _loads_code(setting: object) -> bool:
    return not isinstance(setting, str) or bool(LOADS_CODE.fullmatch(setting.partition("=")[0].strip()))


# The specification as a whole

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
NEEDED_LIBRARIES = ("libcuda.so", "libnvidia-ml.so")


def verify(spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]) -> Verdict:
    """Verify a specification against one request. `live` also has the numbers of nodes that it mounts.

    If the specification is malformed, the verdict has a single problem, which names the malformed part.
    """
    try:
        document = object_of(spec, "the specification")
        common = object_of(document.get("containerEdits", {}), "containerEdits")
        found = devices(document, request)
        listed = [each for each in found if (each.name, each.edits) != (NO_GPU, NO_GPU_EDITS)]
        sieved = document | {"devices": [{"name": each.name, "containerEdits": each.edits} for each in listed]}
        problems = [
            *Sieve(request, live, present).check(sieved, KIND),
            *_common_problems(common, request),
            *devices_problems(listed),
        ]
        served = _paths(common) | {node.path for device in found for node in device.nodes}
        mounted = strings(common, "mounts", "hostPath")
    except DocumentError as error:
        return Verdict(problems=(error.message,))
    missing = missing_gpus(found, request)
    if not problems and len(missing) == len(request.gpus):
        problems.append("no device in it is a granted GPU")
    files = sorted(file.target for file in request.files if not file.link)
    unserved = [node for node in request.devices if node.path not in served]
    # GPUs and MIG devices that no device has are listed as such, not by their nodes.
    others = (node.path for node in unserved if node.kind != DeviceKind.GPU and not instance_of(node))
    return Verdict(
        tuple(problems),
        missing,
        (*(file for file in files if f"{request.driver_root}/{file}" not in mounted), *sorted(others)),
        tuple(each.name for each in found),
        {
            f"{instance} of {node.pci_address}": node.pci_address
            for node in unserved
            if (instance := instance_of(node)) and instance.ci is not None
        },
    )


def _common_problems(common: dict[str, Any], request: Request) -> Iterator[str]:
    """Yield what is missing for all containers, and the nodes that not every container may have."""
    present = _paths(common)
    kinds = {device.path: device.kind for device in request.devices}
    for kind in sorted(COMMON - {kinds.get(path) for path in present}):
        yield f"no {kind} node, without which no container can compute"
    for path in sorted(path for path, kind in kinds.items() if kind in COMMON and path not in present):
        yield f"device node {path} is not in it"
    for path in sorted(path for path in present if path in kinds and kinds[path] not in SHARED):
        yield f"every container would get the {kinds[path]} node {path}"
    yield from library_problems(common, request)
    variables = items(common, "env")
    for variable in request.environment:
        if f"{variable.name}={variable.value}" not in variables:
            yield f"environment variable {variable.name} is not set to {variable.value!r}"
    if VOID_VARIABLE not in variables:
        yield f"environment variable {VOID_VARIABLE} is not in it, so a pod could get other GPUs of the machine"


def library_problems(common: dict[str, Any], request: Request) -> Iterator[str]:
    """Yield a problem for each missing library, and if the loader in containers would not find libcuda.

    Two sets of libraries must not be missing: NEEDED_LIBRARIES, and the native libraries in the driver root whose names
    end in the driver's version.
    """
    mounted = strings(common, "mounts", "hostPath")
    for library in NEEDED_LIBRARIES:
        if not any(posixpath.basename(path).startswith(f"{library}.") for path in mounted):
            yield f"{library} is not in it"
    native = [
        posixpath.dirname(file.target)
        for file in request.files
        if posixpath.basename(file.target) == f"libcuda.so.{request.driver_version}" and "i386" not in file.target
    ]
    for file in request.files:
        belongs = posixpath.dirname(file.target) in {f"{each}{end}" for each in native for end in ("", "/vdpau")}
        versioned = file.target.endswith(f".so.{request.driver_version}")
        if belongs and versioned and not file.link and f"{request.driver_root}/{file.target}" not in mounted:
            yield f"library {file.target} is not in it"
    listed = {flag for hook in objects(common, "hooks") for flag in flags(items(hook, "args")[2:])}
    for directory in native:
        if ("--folder", f"/{directory}") not in listed:
            yield f"no hook adds /{directory} to the loader's cache of containers"
