"""NVIDIA in the machine: generates CDI specifications with the toolkit's programs, and verifies them."""

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from agent.model.contract import AllocatableDevice
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.errors import AgentError, DocumentError
from agent.model.handoff import FabricAnswer, Request
from agent.model.text import quoted
from agent.system.files import System
from agent.vendors.cdi import all_edits, devices, object_of, objects, strings
from agent.vendors.machine_vendor import EDIT_LIMIT, Generated, MachineVendor, RuntimeHandler
from agent.vendors.nvidia import contract, nvidia_ctk
from agent.vendors.nvidia import verify as cdi
from agent.vendors.nvidia.command import HOOK, NVIDIA_CTK
from agent.vendors.nvidia.contract import SPEC_KIND, is_settled, parse_instance
from agent.vendors.nvidia.file_groups import DATA_DIRECTORIES
from agent.vendors.nvidia.nvidia_ctk import in_words, with_additions
from agent.vendors.nvidia.verify import GPU_UUID, KIND, MIG_UUID

RUNTIME_SETTINGS: dict[str, dict[str, Any]] = {
    # In its default mode, auto, the runtime makes its own specification in memory, without the agent's driver root and
    # hooks. Pods with a RuntimeClass would then not use the specification that the agent published.
    "nvidia-container-runtime": {"mode": "cdi"},
    "nvidia-container-runtime.modes.cdi": {
        "default-kind": KIND,
        "spec-dirs": ["/etc/cdi", "/var/run/cdi"],
        "annotation-prefixes": ["cdi.k8s.io/"],
    },
}
"""Keys that the runtime's configuration must have, by table (api/config/v1/runtime.go in the toolkit's source)."""


def edit_runtime_config(text: str) -> str:
    """Return the text with RUNTIME_SETTINGS set, or `text` itself if they are already set.

    All other settings are kept. Comments are kept if tomlkit can edit the text.
    """
    # Imported here: a run that changes nothing does not need it.
    from agent.model.toml_document import parse_toml

    where = "nvidia-container-runtime's config.toml"
    try:
        wanted, before = parse_toml(text), parse_toml(text)
    except RecursionError as error:
        raise DocumentError(f"{where}: nested too deeply: {error}", "nest tables less deeply, or remove it") from error
    # The text is not TOML, or has a number with more digits than int() accepts.
    except ValueError as error:
        raise DocumentError(f"{where}: not TOML: {error}", "repair or remove it") from error
    try:
        for names, keys in RUNTIME_SETTINGS.items():
            _table(wanted, names.split(".")).update(keys)
        if wanted == before:
            return text
        if len(text) > EDIT_LIMIT:
            raise DocumentError(
                f"{where}: has {len(text)} characters, but the agent edits at most {EDIT_LIMIT}", "shorten or remove it"
            )
        return _with_settings(text, wanted)
    except RecursionError as error:
        raise DocumentError(f"{where}: cannot be edited: its tables are nested too deeply", "repair it") from error


def _with_settings(text: str, wanted: dict[str, Any]) -> str:
    """Return the `wanted` settings as TOML, with the comments of `text` if tomlkit can keep them."""
    # Imported here: the import takes longer than a run that changes nothing.
    import tomlkit

    from agent.model.toml_document import parse_toml

    try:
        edited = _edited(text)
        if parse_toml(edited) == wanted:
            return edited
    # Any exception is caught: tomlkit fails for dotted keys and for unusual orders of tables, and the TOML that it
    # writes may be invalid.
    except Exception:
        pass
    return f"# Setting the agent's keys removed the comments.\n{tomlkit.dumps(wanted)}"


def _edited(text: str) -> str:
    import tomlkit

    document = tomlkit.parse(text)
    for names, keys in RUNTIME_SETTINGS.items():
        table: Any = document
        for name in names.split("."):
            if name not in table:
                table[name] = tomlkit.table()
            table = table[name]
        table.update(keys)
    return tomlkit.dumps(document)


def _table(document: dict[str, Any], names: list[str]) -> dict[str, Any]:
    for number, name in enumerate(names, start=1):
        document = document.setdefault(name, {})
        if not isinstance(document, dict):
            raise AgentError(
                f"nvidia-container-runtime's config.toml: {'.'.join(names[:number])} is not a table",
                "repair or remove it",
            )
    return document


# Verifies the CDI specification that NVIDIA's device plugin writes for itself.
#
# The plugin writes the file only when the plugin starts (internal/cdi/cdi.go of k8s-device-plugin). A new driver root,
# a new major number, or a new or removed GPU makes the file outdated. The file may differ from the agent's
# specification, for example in its hooks, or because it has annotations (the plugin's feature flags). A difference is a
# problem only if it keeps pods from their GPUs.


def plugin_spec_problems(
    spec: object,
    own: object,
    request: Request,
    live: Mapping[str, DeviceNumber],
    exists: Callable[[str], bool],
) -> tuple[str, ...]:
    """Return why pods would not get GPUs through this specification. The same problem is listed only once."""
    try:
        document = object_of(spec, "the specification")
        if document.get("kind") != SPEC_KIND:
            return (f"its kind is {quoted(str(document.get('kind')))}, not {SPEC_KIND}",)
        found = [
            problem for each in all_edits(document, foreign=True) for problem in _problems(each, request, live, exists)
        ]
        found += _missing(document, own, request)
    except DocumentError as error:
        return (error.message,)
    return tuple(dict.fromkeys(found))


def _problems(
    edits: dict[str, Any], request: Request, live: Mapping[str, DeviceNumber], exists: Callable[[str], bool]
) -> Iterator[str]:
    granted = {device.path for device in request.devices}
    for node in objects(edits, "deviceNodes"):
        path = node.get("hostPath") or node.get("path")
        if not isinstance(path, str):
            yield f"device node {quoted(str(path))} is not granted to this machine"
            continue
        number = live.get(path)
        if number is None:
            what = "is not in this machine" if path in granted else "is not granted to this machine"
            yield f"device node {quoted(path)} {what}"
        # If the major is omitted, the container runtime looks up the number. If only the minor is omitted, it is 0.
        elif node.get("major") and (node["major"], node.get("minor", 0)) != (number.major, number.minor):
            specified, is_now = quoted(f"{node['major']}:{node.get('minor', 0)}"), f"{number.major}:{number.minor}"
            yield f"device node {path} is {specified} in the specification, but {is_now} in this machine"
    for key, field in (("mounts", "hostPath"), ("hooks", "path")):
        for path in sorted(strings(edits, key, field)):
            if not exists(path):
                yield f"{quoted(path)} does not exist"


def _missing(document: dict[str, Any], own: object, request: Request) -> Iterator[str]:
    """Yield a problem for each GPU that `document` lacks, but `own`, the agent's specification, has.

    If `own` is malformed, yield nothing.
    """
    try:
        own_nodes = _gpu_nodes(object_of(own, "the specification"), request)
    except DocumentError:
        return
    for path in sorted(own_nodes - _gpu_nodes(document, request)):
        yield f"it has no device with {path}"


def _gpu_nodes(document: dict[str, Any], request: Request) -> set[str]:
    gpus = {device.path for device in request.devices if device.kind == DeviceKind.GPU}
    return gpus & {
        path for _, edits in devices(document, foreign=True) for path in strings(edits, "deviceNodes", "path")
    }


# The GPUs and MIG devices of a verified specification that a pod can have. A device is
# named by UUID, because its index changes when another GPU or MIG device is added or removed.


def allocatable(spec: object, request: Request, names: Set[str]) -> tuple[AllocatableDevice, ...]:
    """Return the GPUs and MIG devices whose UUIDs are in `names`. Devices named by index, and `all`, are left out.

    If a GPU has MIG devices, only these are returned, and not the GPU itself: otherwise one pod could get the GPU, and
    another pod a part of the same GPU. Raises DocumentError.
    """
    granted = {each.path: each for each in request.devices}
    found: dict[tuple[str, tuple[int, ...]], AllocatableDevice] = {}
    for name, edits in devices(object_of(spec, "the specification")):
        if name not in names or not (GPU_UUID.fullmatch(name) or MIG_UUID.fullmatch(name)):
            continue
        nodes = [granted[path] for path in strings(edits, "deviceNodes", "path") & set(granted)]
        gpus = {each.pci_address for each in nodes if each.kind == DeviceKind.GPU}
        instances = [instance for each in nodes if (instance := parse_instance(each.capability))]
        compute = [(each.gi, each.ci) for each in instances if each.ci is not None]
        # In a verified specification, each device has one GPU node; a MIG device also has one compute instance, and a
        # whole GPU has none. If that is not so, the file has changed since it was verified: skip the device.
        if len(gpus) == 1 and len(compute) == bool(MIG_UUID.fullmatch(name)):
            (gpu,), partition = gpus, compute[0] if compute else ()
            found[gpu, partition] = AllocatableDevice(gpu, (f"{KIND}={name}",), partition)
    partitioned = {gpu for gpu, partition in found if partition}
    return tuple(sorted(each for (gpu, partition), each in found.items() if partition or gpu not in partitioned))


class NvidiaMachine(MachineVendor):
    """NVIDIA in the machine."""

    name = "nvidia"
    handler = RuntimeHandler("nvidia", "/usr/bin/nvidia-container-runtime")
    driver_files = True
    spec_kind = cdi.KIND
    rival_spec = nvidia_ctk.REFRESHED_SPEC
    rival_units = nvidia_ctk.REFRESH_UNITS
    data_directories = DATA_DIRECTORIES
    tools = (NVIDIA_CTK, HOOK)
    runtime_config = "/etc/nvidia-container-runtime/config.toml"
    runtime_settings = RUNTIME_SETTINGS
    resource_prefix = contract.RESOURCE_PREFIX
    harmless_resources = contract.HARMLESS_RESOURCES
    plugin_sockets = contract.SOCKETS
    # Without the first path, NVML may report "GPU access blocked by the operating system" (systemd issue 38018).
    kernel_paths = ("/sys/module/nvidia", "/proc/driver/nvidia")
    plugin_spec = contract.SPEC
    cdi_modes = nvidia_ctk.MODES
    markers = contract.MARKERS

    verify = staticmethod(cdi.verify)
    list_devices = staticmethod(nvidia_ctk.list_devices)
    edit_runtime_config = staticmethod(edit_runtime_config)
    generate_mode = staticmethod(nvidia_ctk.generate_mode)
    verify_mode = staticmethod(nvidia_ctk.verify_mode)
    plugin_spec_problems = staticmethod(plugin_spec_problems)
    allocatable = staticmethod(allocatable)

    def generate(self, system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
        generated = nvidia_ctk.generate(system, request, directory, live)
        present = {path for path in self.optional_paths(request) if system.exists(path)}
        spec, added = with_additions(generated.spec, request, present)
        without_socket = contract.missing_daemons(request.sockets, present)
        remarks = (
            f"added what {NVIDIA_CTK} leaves out: {in_words(added)}" if added else "",
            f"no socket of {', '.join(without_socket)} yet: start the daemon on the host" if without_socket else "",
        )
        return generated._replace(spec=spec, remarks=(*filter(None, remarks), *generated.remarks))

    def query_fabric(self, system: System, request: Request) -> tuple[FabricAnswer, ...]:
        return nvidia_ctk.query_fabric(system, request.gpus) if request.driver_root else ()

    def fabric_settled(self, request: Request, answers: tuple[FabricAnswer, ...]) -> bool:
        return is_settled(request.gpus, answers)

    def optional_paths(self, request: Request) -> tuple[str, ...]:
        return tuple(contract.mount_points(request.sockets))

    def bound_directories(self, request: Request) -> tuple[str, ...]:
        return tuple(contract.DIRECTORIES[name] for name in request.sockets if name in contract.DIRECTORIES)

    def gpu_of(self, name: str, request: Request) -> str:
        return contract.gpu_of(name)
