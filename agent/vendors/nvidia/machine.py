"""NVIDIA in the machine: generates CDI specifications with the toolkit's programs, and verifies them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Set
from typing import Any

from agent.model.contract import AllocatableDevice
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.errors import AgentError, DocumentError
from agent.model.handoff import FabricAnswer, Request
from agent.model.json_document import parse_toml
from agent.model.text import quoted, whole_number
from agent.system.files import System
from agent.vendors.cdi import all_edits, few, object_of, objects, strings
from agent.vendors.cdi import devices as devices_of
from agent.vendors.machine_vendor import EDIT_LIMIT, MachineVendor, RuntimeHandler
from agent.vendors.nvidia import contract, nvidia_ctk, verify
from agent.vendors.nvidia.contract import HOOK, NVIDIA_CTK, SPEC_KIND, has_fabric, is_registered
from agent.vendors.nvidia.file_groups import DATA_DIRECTORIES
from agent.vendors.nvidia.verify import BY_UUID, KIND, devices

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
    where = "nvidia-container-runtime's config.toml"
    try:
        wanted, before = parse_toml(text), parse_toml(text)
        _set(wanted, dict)
        if wanted == before:
            return text
        if len(text) > EDIT_LIMIT:
            raise DocumentError(
                f"{where}: has {len(text)} characters, but the agent edits at most {EDIT_LIMIT}", "shorten or remove it"
            )
        # Imported here: the import takes longer than a run that changes nothing.
        import tomlkit

        # Any exception is caught: tomlkit fails for dotted keys and for unusual orders of tables, and the TOML that it
        # writes may be invalid.
        try:
            document = tomlkit.parse(text)
            _set(document, tomlkit.table)
            edited = tomlkit.dumps(document)
            if parse_toml(edited) == wanted:
                return edited
        except Exception:
            pass
        return f"# Setting the agent's keys removed the comments.\n{tomlkit.dumps(wanted)}"
    # The text is not TOML, or has a number with more digits than int() accepts.
    except ValueError as error:
        raise DocumentError(f"{where}: not TOML: {error}", "repair or remove it") from error


def _set(document: Any, new_table: Callable[[], Any]) -> None:  # noqa: ANN401
    """Set RUNTIME_SETTINGS in a document of dictionaries, or of what `new_table` returns."""
    for names, keys in RUNTIME_SETTINGS.items():
        table, path = document, ""
        for name in names.split("."):
            if name not in table:
                table[name] = new_table()
            table, path = table[name], f"{path}.{name}".lstrip(".")
            if not isinstance(table, Mapping):
                raise AgentError(
                    f"nvidia-container-runtime's config.toml: {path} is not a table", "repair or remove it"
                )
        table.update(keys)


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
        edits = all_edits(document, foreign=True)
        fields = (("mounts", "hostPath"), ("hooks", "path"))
        paths = few({path for each in edits for key, field in fields for path in strings(each, key, field)})
        found = [problem for each in edits for problem in _node_problems(each, request, live)]
        found += [f"{quoted(path)} does not exist" for path in sorted(paths) if not exists(path)]
        served = _gpu_nodes(document, request)
    except DocumentError as error:
        return (error.message,)
    try:
        own_nodes = _gpu_nodes(object_of(own, "the specification"), request)
    except DocumentError:
        own_nodes = set()
    return tuple(dict.fromkeys((*found, *(f"it has no device with {path}" for path in sorted(own_nodes - served)))))


def _node_problems(edits: dict[str, Any], request: Request, live: Mapping[str, DeviceNumber]) -> Iterator[str]:
    granted = {device.path for device in request.devices}
    for node in objects(edits, "deviceNodes"):
        path = node.get("hostPath") or node.get("path")
        number = live.get(path) if isinstance(path, str) else None
        if number is None:
            known = isinstance(path, str) and path in granted
            what = "is not in this machine" if known else "is not granted to this machine"
            yield f"device node {quoted(str(path))} {what}"
        # If the major is omitted, the container runtime looks up the number. If only the minor is omitted, it is 0.
        elif node.get("major") and (node["major"], node.get("minor", 0)) != (number.major, number.minor):
            specified, is_now = quoted(f"{node['major']}:{node.get('minor', 0)}"), f"{number.major}:{number.minor}"
            yield f"device node {path} is {specified} in the specification, but {is_now} in this machine"


def _gpu_nodes(document: dict[str, Any], request: Request) -> set[str]:
    gpus = {device.path for device in request.devices if device.kind == DeviceKind.GPU}
    return gpus & {
        path for _, edits in devices_of(document, foreign=True) for path in strings(edits, "deviceNodes", "path")
    }


def allocatable(spec: object, request: Request, names: Set[str]) -> tuple[AllocatableDevice, ...]:
    """Return the GPUs and MIG devices whose UUIDs are in `names`. Devices named by index, and `all`, are left out.

    An index changes when another GPU or MIG device is added or removed. If a GPU has MIG devices, only these are
    returned, and not the GPU itself: otherwise one pod could get the GPU, and another pod a part of the same GPU.
    Raises DocumentError.
    """
    found: dict[tuple[str, tuple[int, ...]], AllocatableDevice] = {}
    for device in devices(object_of(spec, "the specification"), request):
        gpus, compute = set(device.gpus), [(each.gi, each.ci) for each in device.instances if each.ci is not None]
        # In a verified specification, each device has one GPU node; a MIG device also has one compute instance, and a
        # whole GPU has none. If that is not so, the file has changed since it was verified: skip the device.
        sound = len(gpus) == 1 and len(compute) == device.is_mig
        if sound and device.name in names and BY_UUID.fullmatch(device.name):
            (gpu,), partition = gpus, compute[0] if compute else ()
            found[gpu, partition] = AllocatableDevice(gpu, (f"{KIND}={device.name}",), partition)
    partitioned = {gpu for gpu, partition in found if partition}
    return tuple(sorted(each for (gpu, partition), each in found.items() if partition or gpu not in partitioned))


class NvidiaMachine(MachineVendor):
    """NVIDIA in the machine."""

    name = "nvidia"
    handler = RuntimeHandler("nvidia", "/usr/bin/nvidia-container-runtime")
    driver_files = True
    spec_kind = KIND
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
    test_program = "gpu_test.py"
    monitors = contract.MONITORS
    markers = contract.MARKERS

    generate = staticmethod(nvidia_ctk.generate)
    verify = staticmethod(verify.verify)
    edit_runtime_config = staticmethod(edit_runtime_config)
    generate_mode = staticmethod(nvidia_ctk.generate_mode)
    verify_mode = staticmethod(nvidia_ctk.verify_mode)
    plugin_spec_problems = staticmethod(plugin_spec_problems)
    allocatable = staticmethod(allocatable)

    def query_fabric(self, system: System, request: Request) -> tuple[FabricAnswer, ...]:
        return nvidia_ctk.query_fabric(system, request.gpus) if request.driver_root else ()

    def fabric_settled(self, request: Request, answers: tuple[FabricAnswer, ...]) -> bool:
        return {each.gpu for each in answers if is_registered(each) or not has_fabric(each)}.issuperset(request.gpus)

    def health_fields(self, system: System) -> tuple[str, ...]:
        return nvidia_ctk.health_fields(system)

    def query_health(
        self, system: System, request: Request, gpus: Collection[str], fields: tuple[str, ...]
    ) -> Mapping[str, Mapping[str, str]]:
        return nvidia_ctk.query_health(system, request.gpus, gpus, fields)

    def count_link_errors(
        self, system: System, request: Request, gpus: Collection[str]
    ) -> Mapping[str, Mapping[str, int]]:
        return nvidia_ctk.count_link_errors(system, request.gpus, gpus)

    def link_words(self, before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> Mapping[str, str]:
        return {contract.LINK_ERRORS: contract.link_word(before, after, seconds)}

    def uncorrected_errors(self, system: System, request: Request, gpu: str) -> Mapping[str, int]:
        fields = nvidia_ctk.health_fields(system, (contract.UNCORRECTED, contract.UNCORRECTED_EVER))
        said = nvidia_ctk.query_health(system, request.gpus, (gpu,), fields).get(gpu, {}) if fields else {}
        return {field: count for field, word in said.items() if (count := whole_number(word)) is not None}

    def in_persistence_mode(self, answer: FabricAnswer, said: Mapping[str, str]) -> bool:
        return answer.persistence == "Enabled" and said.get(contract.PERSISTENCE) != "Disabled"

    def optional_paths(self, request: Request) -> tuple[str, ...]:
        return tuple(contract.mount_points(request.sockets))

    def bound_directories(self, request: Request) -> tuple[str, ...]:
        return tuple(contract.DIRECTORIES[name] for name in request.sockets if name in contract.DIRECTORIES)

    def gpu_of(self, name: str, request: Request) -> str:
        return contract.gpu_of(name)
