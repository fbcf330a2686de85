"""The interface of a vendor to the machine half. Standard library only; data in, data out, except `generate`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from agent.model.device import DeviceNumber
from agent.model.handoff import GrantedDevice, Request
from agent.model.paths import spec_file
from agent.system.files import System

EDIT_LIMIT = 1 << 17
"""Characters of TOML to edit with its comments: tomlkit takes 0.6 s for as many in empty lines, 21 s for 1 MiB."""


@dataclass(frozen=True, slots=True)
class RuntimeHandler:
    """A runtime of containerd: the name that a RuntimeClass uses, and the program that replaces runc."""

    name: str
    binary: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying a CDI specification against one request."""

    problems: tuple[str, ...] = ()
    """Each one forbids publishing the specification."""
    missing_gpus: tuple[str, ...] = ()
    """Granted GPUs (PCI addresses) that it does not serve; the others may still be used."""
    not_in_spec: tuple[str, ...] = ()
    """Files of the driver root that no pod gets through it."""
    devices: tuple[str, ...] = ()
    """Its device names."""
    missing_partitions: tuple[str, ...] = ()
    """Granted partitions of GPUs (MIG devices) that it does not serve."""

    @property
    def missing(self) -> frozenset[str]:
        """Return everything that is granted and not served."""
        return frozenset((*self.missing_gpus, *self.missing_partitions))


@dataclass(frozen=True, slots=True)
class Generated:
    """A generator's result for a request."""

    spec: object
    """Parsed."""
    remarks: tuple[str, ...] = ()
    unpartitioned: tuple[str, ...] = ()
    """Granted GPUs (PCI addresses) that are usable only by partitions but have none: no specification serves them."""


class MachineVendor(ABC):
    """One vendor in the machine. The defaults are those of a vendor without that feature."""

    name: str
    handler: RuntimeHandler | None = None
    """None if pods request only CDI devices."""
    driver_files = False
    """Whether its devices are useless without a driver root."""
    spec_kind: str
    """The kind of its devices, such as `vendor.com/class`."""
    rival_spec = ""
    """Where the vendor's own packages publish one of the same kind, which would outrank ours; may be empty."""
    rival_units: tuple[str, ...] = ()
    """The units that do so."""
    data_directories: tuple[str, ...] = ()
    """Directories of loaders' configuration, below driver roots. The device plugin looks for it in the machine."""
    tools: tuple[str, ...] = ()
    """Programs that the specification depends on: a new one means to generate it again. The first one generates it."""
    inputs: tuple[str, ...] = ()
    """Files that it depends on as well."""
    runtime_config = ""
    """The configuration file of the handler's program; empty without one."""
    resource_prefix: str
    """Prefix of the extended resources that the vendor's device plugin offers, such as `vendor.com/`."""
    plugin_sockets: str
    """Names of its sockets in the kubelet's directory, as a pattern of fnmatch."""
    plugin_rescans = False
    """Whether it finds GPUs that are added after it has begun to serve."""
    kernel_paths: tuple[str, ...] = ()
    """What the kernel shows of a loaded driver, and what the vendor's libraries look for."""
    plugin_spec = ""
    """Where that plugin writes a CDI specification of its own, whose devices it gives to pods; "" if it never does."""

    @property
    def spec_path(self) -> str:
        """Return where the CDI specification is published."""
        return spec_file(self.name)

    @property
    def cdi_modes(self) -> "CdiModes | None":
        """Return its modes; None if the vendor's generator makes only specifications of GPUs."""
        return None

    @abstractmethod
    def generate(self, system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
        """Make a new specification in an empty directory; `live` as in `verify`. Raises AgentError or OSError."""

    def optional_paths(self, request: Request) -> tuple[str, ...]:
        """Return paths in the machine that come and go: what the specification contains depends on them. Pure."""
        return ()

    def bound_directories(self, request: Request) -> tuple[str, ...]:
        """Return directories that the host binds into the machine while it runs. Pure."""
        return ()

    @abstractmethod
    def verify(
        self, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> Verdict:
        """Check that the specification holds what was granted and nothing else. Pure.

        `live` has the numbers of the machine's device nodes, `present` the host paths in the specification that exist.
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
        """Say why pods would not get GPUs by the plugin's specification. Pure except `exists`, which reads the machine.

        `own` is the specification that we published, `live` as in `verify`.
        """
        return ()

    @abstractmethod
    def list_devices(self, system: System, directory: str) -> tuple[str, ...]:
        """Return qualified names of the devices of all valid specifications in a directory; raises AgentError."""

    @abstractmethod
    def gpu_of(self, name: str, request: Request) -> str:
        """Return the GPU's identity in a device id of the kubelet or a CDI device name, "" if there is none. Pure."""

    def edit_runtime_config(self, text: str) -> str:
        """Return the file's text as it must be: `text` itself if nothing is to change; raises AgentError. Pure."""
        return text


class CdiModes(ABC):
    """Further CDI specifications that a vendor's generator makes, each in a mode of its own."""

    tools: tuple[str, ...]
    """As in MachineVendor."""

    @abstractmethod
    def kind(self, mode: str) -> str:
        """Return its devices' kind; empty for a mode unknown to this release, which no other method handles. Pure."""

    @abstractmethod
    def basis(self, mode: str, request: Request, granted: Collection[GrantedDevice]) -> Request:
        """Return what the mode uses of the vendor's request, with those of all granted devices that it covers. Pure.

        Nothing is made if there is no such device.
        """

    @abstractmethod
    def optional_paths(self, mode: str) -> tuple[str, ...]:
        """Return what it mounts if present. Pure."""

    @abstractmethod
    def generate(self, system: System, mode: str, request: Request, directory: str, limit: float) -> object:
        """Make a specification in an empty directory within `limit` seconds; raises AgentError or OSError."""

    @abstractmethod
    def narrowed(self, spec: object, request: Request) -> object:
        """Return a published specification without nodes outside the request; None if nothing is left. Pure."""

    @abstractmethod
    def verify(
        self, mode: str, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> tuple[str, ...]:
        """Return what forbids publishing it. Pure; arguments as in MachineVendor."""
