"""What a vendor offers to the machine half. Standard library only, and data in, data out but for `generate`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from agent.handoff import GrantedDevice, Request
from agent.identity import DeviceNumber
from agent.system.files import System


@dataclass(frozen=True, slots=True)
class RuntimeHandler:
    """A runtime of containerd: the name that a RuntimeClass refers to, and the program that stands in for runc."""

    name: str
    binary: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a CDI spec is worth for one request."""

    problems: tuple[str, ...] = ()
    """Each one forbids to publish the spec."""
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
        """All that is granted and not served."""
        return frozenset((*self.missing_gpus, *self.missing_partitions))


@dataclass(frozen=True, slots=True)
class Generated:
    """What a generator made of a request."""

    spec: object
    """Parsed."""
    remarks: tuple[str, ...] = ()
    unpartitioned: tuple[str, ...] = ()
    """Granted GPUs (PCI addresses) that can be used by partitions only and have none: no spec can serve them."""


class MachineVendor(Protocol):
    """One vendor in the machine."""

    name: str
    handler: RuntimeHandler | None
    """None where pods ask for CDI devices alone."""
    driver_files: bool
    """Whether its devices are of no use without a driver root."""
    spec_path: str
    """Where the CDI spec is published: agent.paths.spec_file of its name."""
    spec_kind: str
    """The kind of its devices, such as `vendor.com/class`."""
    rival_spec: str
    """Where the vendor's own packages publish a spec of the same kind, which would outrank ours; may be empty."""
    rival_units: tuple[str, ...]
    """The units that do so."""
    data_directories: tuple[str, ...]
    """Below driver roots: what loaders are configured by. The vendor's device plug-in looks for it in the machine."""
    tools: tuple[str, ...]
    """Programs that the spec depends on: a new one means that it is generated again. The first one generates it."""
    inputs: tuple[str, ...]
    """Files that it depends on as well."""
    runtime_config: str
    """The configuration file of the handler's program; empty without one."""
    resource_prefix: str
    """Of the extended resources that the vendor's device plug-in offers, such as `vendor.com/`."""
    plugin_sockets: str
    """Names of its sockets in the kubelet's directory, as a pattern of fnmatch."""
    plugin_rescans: bool
    """Whether it finds by itself the GPUs that come after it has begun to serve."""

    kernel_paths: tuple[str, ...]
    """What the kernel shows of the driver while it is loaded, and the vendor's libraries look for; else "()"."""
    plugin_spec: str
    """Where that plug-in writes a CDI spec of its own, whose devices it then gives to pods; "" if it never does."""

    def generate(self, system: System, request: Request, directory: str, live: Mapping[str, DeviceNumber]) -> Generated:
        """A new spec, made in an empty directory; `live` as in `verify`. Raises AgentError or OSError."""
        ...

    def optional_paths(self, request: Request) -> tuple[str, ...]:
        """Paths in the machine that come and go: whether they are there decides what is in the spec. Pure."""
        ...

    def bound_directories(self, request: Request) -> tuple[str, ...]:
        """Directories that the host binds into the machine while it runs. Pure."""
        ...

    def verify(
        self, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> Verdict:
        """Whether the spec holds what was granted and nothing else. Pure.

        `live` has the numbers of the machine's device nodes, `present` the host paths of the spec that exist.
        """
        ...

    def host_paths(self, spec: object) -> tuple[str, ...]:
        """The host paths of all mounts of the spec. Pure."""
        ...

    def plugin_spec_problems(
        self,
        spec: object,
        own: object,
        request: Request,
        live: Mapping[str, DeviceNumber],
        exists: Callable[[str], bool],
    ) -> tuple[str, ...]:
        """Why pods would not get GPUs by the plug-in's own spec. Pure but for `exists`, which looks in the machine.

        `own` is the spec that we published, `live` as in `verify`.
        """
        ...

    def list_devices(self, system: System, directory: str) -> tuple[str, ...]:
        """Qualified names of the devices of all valid specs in a directory; raises AgentError."""
        ...

    def gpu_of(self, name: str, request: Request) -> str:
        """The GPU's identity in a device id of the kubelet or a device name of the spec, "" if it has none. Pure."""
        ...

    def edit_runtime_config(self, text: str) -> str:
        """The file's text as it must be: `text` itself when nothing is to change; raises AgentError. Pure."""
        ...


class CdiModes(Protocol):
    """Further CDI specs that a vendor's generator makes, each in a mode of its own."""

    tools: tuple[str, ...]
    """As of a MachineVendor."""

    def kind(self, mode: str) -> str:
        """Of its devices; empty for a mode that this release does not know: nothing else is asked of it. Pure."""
        ...

    def basis(self, mode: str, request: Request, granted: Collection[GrantedDevice]) -> Request:
        """What of the vendor's request the mode is made from, with those of all granted devices that it is about. Pure.

        Where there is no such device, nothing is made.
        """
        ...

    def optional_paths(self, mode: str) -> tuple[str, ...]:
        """What it mounts where it is there. Pure."""
        ...

    def generate(self, system: System, mode: str, request: Request, directory: str, limit: float) -> object:
        """A new spec of such a request, made in an empty directory in so many seconds; raises AgentError or OSError."""
        ...

    def narrowed(self, spec: object, request: Request) -> object:
        """A spec that was published once, without nodes that are not such a request's; None: nothing is left. Pure."""
        ...

    def verify(
        self, mode: str, spec: object, request: Request, live: Mapping[str, DeviceNumber], present: Collection[str]
    ) -> tuple[str, ...]:
        """What forbids to publish it. Pure; arguments as of a MachineVendor's."""
        ...
