"""The interface of a vendor to the machine half, which imports only the standard library.

All methods are pure, except `generate` and `list_devices`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from agent.model.device import DeviceNumber
from agent.model.handoff import GrantedDevice, Request
from agent.model.paths import spec_file
from agent.system.files import System

EDIT_LIMIT = 1 << 17
"""Characters of the longest TOML that is edited with its comments. tomlkit needs 0.6 s for that, and 21 s for 1 MiB."""


@dataclass(frozen=True, slots=True)
class RuntimeHandler:
    """A runtime of containerd: the name that a RuntimeClass uses, and the program that replaces runc."""

    name: str
    binary: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying a CDI specification against one request."""

    problems: tuple[str, ...] = ()
    """Reasons why the specification must not be published."""
    missing_gpus: tuple[str, ...] = ()
    """PCI addresses of granted GPUs that the specification does not have; the others may still be used."""
    not_in_spec: tuple[str, ...] = ()
    """Files of the driver root that the specification does not mount."""
    devices: tuple[str, ...] = ()
    """Names of the devices in the specification."""
    missing_partitions: tuple[str, ...] = ()
    """Granted partitions of GPUs (MIG devices) that the specification does not have."""

    @property
    def missing(self) -> frozenset[str]:
        """Return the granted GPUs and partitions that the specification does not have."""
        return frozenset((*self.missing_gpus, *self.missing_partitions))


@dataclass(frozen=True, slots=True)
class Generated:
    """A generator's result for a request."""

    spec: object
    """The specification, parsed."""
    remarks: tuple[str, ...] = ()
    unpartitioned: tuple[str, ...] = ()
    """PCI addresses of granted GPUs that can be used only by their partitions, and have none."""


class MachineVendor(ABC):
    """One vendor in the machine. The defaults are those of a vendor without that feature."""

    name: str
    handler: RuntimeHandler | None = None
    """The runtime that pods name in a RuntimeClass; None if pods need none."""
    driver_files = False
    """Whether the vendor's devices are useless without a driver root."""
    spec_kind: str
    """The kind of the vendor's CDI devices, such as `vendor.com/class`."""
    rival_spec = ""
    """Where the vendor's own packages publish a specification of this kind, which takes precedence; may be empty."""
    rival_units: tuple[str, ...] = ()
    """The units that publish it."""
    data_directories: tuple[str, ...] = ()
    """Directories below driver roots with the configuration of loaders. The device plugin expects it in the machine."""
    tools: tuple[str, ...] = ()
    """Programs that the specification depends on: it is generated again if one changes. The first one generates it."""
    inputs: tuple[str, ...] = ()
    """Files on which the specification depends in the same way."""
    runtime_config = ""
    """The configuration file of the handler's program; empty if there is none."""
    resource_prefix: str
    """Prefix of the extended resources that the vendor's device plugin offers, such as `vendor.com/`."""
    plugin_sockets: str
    """Pattern (fnmatch) of the names of the device plugin's sockets in the kubelet's directory."""
    plugin_rescans = False
    """Whether the device plugin finds GPUs that are added after its start."""
    kernel_paths: tuple[str, ...] = ()
    """Paths in /proc and /sys that exist while the driver is loaded, and that the vendor's libraries need."""
    plugin_spec = ""
    """Where the device plugin writes its own CDI specification, whose devices pods get; empty if it writes none."""

    @property
    def spec_path(self) -> str:
        """Return where the CDI specification is published."""
        return spec_file(self.name)

    @property
    def cdi_modes(self) -> "CdiModes | None":
        """Return the generator's modes; None if it makes only specifications of GPUs."""
        return None

    @abstractmethod
    def generate(self, system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
        """Generate a specification in an empty directory. `live` is as in `verify`. Raises AgentError or OSError."""

    def optional_paths(self, request: Request) -> tuple[str, ...]:
        """Return paths in the machine that may be missing: the specification depends on which exist. Pure."""
        return ()

    def bound_directories(self, request: Request) -> tuple[str, ...]:
        """Return directories that the host binds into the machine while it runs. Pure."""
        return ()

    @abstractmethod
    def verify(
        self, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> Verdict:
        """Return how the specification differs from what was granted. Pure.

        `live` has the machine's device nodes by path, `present` the host paths in the specification that exist.
        """

    @abstractmethod
    def host_paths(self, spec: object) -> tuple[str, ...]:
        """Return the host paths of all mounts in the specification. Pure."""

    def plugin_spec_problems(
        self,
        spec: object,
        own: object,
        request: Request,
        live: Mapping[str, DeviceNumber],
        exists: Callable[[str], bool],
    ) -> tuple[str, ...]:
        """Return why pods would not get GPUs by the device plugin's specification. Pure, except that it calls `exists`.

        `own` is the specification that the agent published, `live` is as in `verify`.
        """
        return ()

    @abstractmethod
    def list_devices(self, system: System, directory: str) -> tuple[str, ...]:
        """Return the qualified names of the devices in all valid specifications in a directory. Raises AgentError."""

    @abstractmethod
    def gpu_of(self, name: str, request: Request) -> str:
        """Return the GPU that a device id of the kubelet or a CDI device name stands for; empty if none. Pure."""

    def edit_runtime_config(self, text: str) -> str:
        """Return the text that `runtime_config` must have; `text` itself if it may stay. Raises AgentError. Pure."""
        return text


class CdiModes(ABC):
    """The modes in which a vendor's generator makes further CDI specifications, one in each mode."""

    tools: tuple[str, ...]
    """Programs on which the specifications depend, as in MachineVendor."""

    @abstractmethod
    def kind(self, mode: str) -> str:
        """Return the kind of the mode's devices; empty for an unknown mode, which no other method accepts. Pure."""

    @abstractmethod
    def basis(self, mode: str, request: Request, granted: Collection[GrantedDevice]) -> Request:
        """Return the request for the mode: parts of the vendor's, with the granted devices that the mode covers. Pure.

        If the result has no device, no specification is made.
        """

    @abstractmethod
    def optional_paths(self, mode: str) -> tuple[str, ...]:
        """Return the paths that the mode's specification mounts if they exist. Pure."""

    @abstractmethod
    def generate(self, system: System, mode: str, request: Request, directory: str, limit: float) -> object:
        """Generate a specification in an empty directory within `limit` seconds. Raises AgentError or OSError."""

    @abstractmethod
    def narrowed(self, spec: object, request: Request) -> object:
        """Return a published specification without nodes outside the request; None if nothing is left. Pure."""

    @abstractmethod
    def verify(
        self, mode: str, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> tuple[str, ...]:
        """Return why the specification must not be published. Pure. The arguments are as in MachineVendor.verify."""
