"""The interface of a vendor to the machine half.

All methods are pure, except `generate`, `generate_mode`, `query_fabric`, `health_fields`, `query_health`,
`uncorrected_errors`, and `plugin_spec_problems`, which calls the given `exists`.
A vendor's `machine.py` imports no third-party package. A method that needs such a package imports it when called.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Set
from typing import NamedTuple

from agent.model.conditions import ConditionType
from agent.model.contract import AllocatableDevice
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.handoff import FabricAnswer, GrantedDevice, Request
from agent.model.paths import spec_file
from agent.system.files import System
from agent.vendors.cdi import host_paths

EDIT_LIMIT = 1 << 17
"""Characters of the longest TOML text that the agent edits. tomlkit needs 0.6 s for a text of this length, and 21 s for
1 MiB."""


class RuntimeHandler(NamedTuple):
    """A runtime handler of containerd: the name that a RuntimeClass uses, and the program that replaces runc."""

    name: str
    binary: str


class Marker(NamedTuple):
    """A file by which other programs learn that all conditions in `proof` are True."""

    path: str
    content: str
    proof: tuple[ConditionType, ...]


class Verdict(NamedTuple):
    """The result of verifying a CDI specification against one request."""

    problems: tuple[str, ...] = ()
    """Reasons why the specification must not be published."""
    missing_gpus: tuple[str, ...] = ()
    """PCI addresses of granted GPUs that the specification does not have. Pods can still use the GPUs that it has."""
    not_in_spec: tuple[str, ...] = ()
    """Files of the driver root, and granted nodes, that the specification leaves out."""
    devices: tuple[str, ...] = ()
    """Names of the devices in the specification."""
    missing_partitions: Mapping[str, str] = {}
    """Granted partitions of GPUs (MIG devices) that the specification does not have, each with its GPU."""

    @property
    def missing(self) -> frozenset[str]:
        """Return the granted GPUs and partitions that the specification does not have."""
        return frozenset((*self.missing_gpus, *self.missing_partitions))


class Generated(NamedTuple):
    """A generator's result for a request."""

    spec: object
    """The specification, parsed."""
    remarks: tuple[str, ...] = ()
    unpartitioned: tuple[str, ...] = ()
    """PCI addresses of granted GPUs that can be used only in partitions, but have no partition."""
    left_out: tuple[str, ...] = ()
    """What the generator wrote and the specification does not have, because the agent does not know it, in words."""


class CdiMode(NamedTuple):
    """A mode of a vendor's generator, in which it makes one further CDI specification."""

    name: str
    """The generator's name of the mode."""
    kind: str
    """The kind of the mode's devices."""
    kinds: frozenset[DeviceKind]
    """Kinds of the nodes that the mode covers."""
    mounts: tuple[str, ...] = ()
    """Paths, other than the driver's files, that are mounted if they exist."""
    driver_files: bool = False
    since: tuple[int, ...] = ()
    """The first version of the generator that has the mode, if it is newer than the oldest that the agent accepts."""

    def request(self, request: Request, granted: Collection[GrantedDevice]) -> Request:
        """Return what the mode needs of a request, with the `granted` devices that it covers; perhaps none."""
        devices = tuple(device for device in granted if device.kind in self.kinds)
        if not self.driver_files:
            return Request(request.vendor, (), devices)
        return Request(request.vendor, (), devices, request.driver_version, request.driver_root, request.files)


def looked_up(
    system: System, spec: object, live: Mapping[str, DeviceNumber]
) -> tuple[dict[str, DeviceNumber], set[str]]:
    """Return `live` and `present` for `verify`: what the specification mounts is looked up.

    Raises OSError, or DocumentError if it mounts too much.

    `live` maps the paths of the granted nodes that exist in the machine to their numbers.
    """
    present = {path for path in host_paths(spec) if path.startswith("/") and system.leads_to_something(path)}
    mounted = {path: number for path in present if (number := system.device(path))}
    return {**mounted, **live}, present


class MachineVendor(ABC):
    """One vendor in the machine. A vendor that lacks a feature keeps the defaults of that feature."""

    name: str
    handler: RuntimeHandler | None = None
    """The runtime handler that pods select by a RuntimeClass; None if they need none."""
    driver_files = False
    """Whether the vendor's devices are useless without a driver root."""
    spec_kind: str
    """The kind of the vendor's CDI devices, such as `vendor.com/class`."""
    rival_spec = ""
    """The path of the CDI specification that the vendor's own packages publish, if any. It takes precedence."""
    rival_units: tuple[str, ...] = ()
    """The units that write `rival_spec`."""
    data_directories: tuple[str, ...] = ()
    """Directories with the configuration of loaders, such as Vulkan's. Device plugins expect those of the driver root
    below the machine's root."""
    tools: tuple[str, ...] = ()
    """Programs whose change makes the agent generate the specification again. The first one is the generator."""
    inputs: tuple[str, ...] = ()
    """Other files whose change makes the agent generate the specification again."""
    runtime_config = ""
    """The configuration file of the handler's program, if any."""
    runtime_settings: Mapping[str, Mapping[str, object]] = {}
    """The keys that `edit_runtime_config` sets in `runtime_config`, by table."""
    resource_prefix: str
    """Prefix of the extended resources that the vendor's device plugin offers, such as `vendor.com/`."""
    harmless_resources: tuple[str, ...] = ()
    """Patterns (fnmatch) of resources with `resource_prefix` that give no pod a GPU of its own."""
    plugin_sockets: str
    """Pattern (fnmatch) of the names of the device plugin's sockets in the kubelet's directory."""
    plugin_rescans = False
    """Whether the device plugin finds GPUs that are added after its start."""
    kernel_paths: tuple[str, ...] = ()
    """Paths in /proc and /sys that exist while the driver is loaded, and that the vendor's libraries need."""
    plugin_spec = ""
    """Where the device plugin writes its own CDI specification, if any, whose devices pods get."""
    cdi_modes: Mapping[str, CdiMode] = {}
    """The generator's further modes, by name."""
    test_program = ""
    """The program in agent/machine that tests one of the vendor's devices, if any."""
    monitors: tuple[str, ...] = ()
    """Programs in pods that have GPUs open although no pod was given these, by their names in /proc/PID/comm."""
    markers: tuple[Marker, ...] = ()
    """The markers that the vendor's components for Kubernetes wait for."""

    @property
    def spec_path(self) -> str:
        """Where the CDI specification is published."""
        return spec_file(self.name)

    @abstractmethod
    def generate(self, system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
        """Generate a specification, in an empty directory. Raises AgentError or OSError. `live` is as in `verify`."""

    def generate_mode(
        self,
        system: System,
        mode: CdiMode,
        request: Request,
        directory: str,
        limit: float,
        live: Mapping[str, DeviceNumber],
    ) -> Generated:
        """Generate a mode's specification within `limit` seconds, as `generate`. The request is CdiMode.request's."""
        raise NotImplementedError

    def verify_mode(
        self, mode: CdiMode, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> tuple[str, ...]:
        """Return why a mode's specification must not be published. The arguments are as in `verify`. Pure."""
        raise NotImplementedError

    def query_fabric(self, system: System, request: Request) -> tuple[FabricAnswer, ...]:
        """Ask the GPUs whether they are registered with the NVLink fabric, which opens them. Some may not answer."""
        return ()

    def fabric_settled(self, request: Request, answers: tuple[FabricAnswer, ...]) -> bool:
        """Return whether these answers are final: all granted GPUs have a working fabric, or none. Pure."""
        return True

    def health_fields(self, system: System) -> tuple[str, ...]:
        """Return what the driver's tool can be asked about a GPU's health: nothing by default. Raises AgentError."""
        return ()

    def query_health(
        self, system: System, request: Request, gpus: Collection[str], fields: tuple[str, ...]
    ) -> Mapping[str, Mapping[str, str]]:
        """Return what these GPUs say of their health, which opens them, by PCI address and field.

        A word is empty if the GPU did not answer; a field that it does not have is missing. A GPU that cannot be opened
        is left out. Raises AgentError or OSError; UnkillableError if the program that asks cannot be killed.
        """
        raise NotImplementedError

    def count_link_errors(
        self, system: System, request: Request, gpus: Collection[str]
    ) -> Mapping[str, Mapping[str, int]]:
        """Return how many errors these GPUs' links to other GPUs have counted, by PCI address and kind.

        That opens them. A GPU without such links is left out. Raises what `query_health` raises.
        """
        return {}

    def link_words(self, before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> Mapping[str, str]:
        """Return what two counts of a GPU's links say of its health, by field as in `query_health`. Pure."""
        return {}

    def uncorrected_errors(self, system: System, request: Request, gpu: str) -> Mapping[str, int]:
        """Return how many uncorrected memory errors the GPU has counted, by counter; none if it does not say.

        Raises what `query_health` raises.
        """
        return {}

    def in_persistence_mode(self, answer: FabricAnswer, said: Mapping[str, str]) -> bool:
        """Return whether the GPU stays initialised while nobody uses it, so that to ask it disturbs nothing. Pure.

        `said` is what it last said of its health.
        """
        return False

    def optional_paths(self, request: Request) -> tuple[str, ...]:
        """Return paths in the machine that may be missing. The specification depends on which of them exist. Pure."""
        return ()

    def bound_directories(self, request: Request) -> tuple[str, ...]:
        """Return directories that the host binds into the running machine. Pure."""
        return ()

    @abstractmethod
    def verify(
        self, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> Verdict:
        """Check the specification against what was granted. Pure.

        `live` has the numbers of nodes that exist in the machine, by path: of the granted ones, and of those that the
        specification mounts. `present` has the existing `hostPath`s of its mounts: CDI's host is the machine.
        """

    def plugin_spec_problems(
        self,
        spec: object,
        own: object,
        request: Request,
        live: Mapping[str, DeviceNumber],
        exists: Callable[[str], bool],
    ) -> tuple[str, ...]:
        """Return why pods would not get GPUs through the device plugin's `spec`; `own` is the agent's. Pure."""
        return ()

    @abstractmethod
    def gpu_of(self, name: str, request: Request) -> str:
        """Return the id of the GPU or partition that `name` stands for, such as a UUID or a PCI address. Pure.

        `name` is a device id of the kubelet or the name of a CDI device: both give the same id. It is empty for a name
        that does not identify a GPU, such as an index or `all`.
        """

    @abstractmethod
    def allocatable(self, spec: object, request: Request, names: Set[str]) -> tuple[AllocatableDevice, ...]:
        """Return the devices of a verified specification with these names that a claim can have. Pure.

        Each GPU is returned only once, and not if it has partitions, because two claims must not get the same GPU.
        Raises DocumentError.
        """

    def edit_runtime_config(self, text: str) -> str:
        """Return what the file `runtime_config` must have in place of `text`: itself if it is right. Pure.

        Raises AgentError.
        """
        return text
