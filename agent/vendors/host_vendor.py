"""The interface of a vendor to the host half. Data in, data out, except `observe`, which reads and never writes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agent.config.settings import DriverSettings, MachineSettings
from agent.model.conditions import Condition, ConditionType
from agent.model.device import DeviceKind
from agent.model.facts import CacheEntry, DrmDevice, Gpu, PciDevice, Seen, VendorFacts
from agent.model.goal import DriverRoots, Grant
from agent.system.files import System


@dataclass(frozen=True, slots=True)
class Sources:
    """The lists that each pass makes once, from which every vendor picks its own."""

    system: System
    architecture: str
    pci: Seen[tuple[PciDevice, ...]]
    drm: Seen[tuple[DrmDevice, ...]]
    loader_cache: Callable[[str], Seen[tuple[CacheEntry, ...]]]
    """Called with a root: `/`, or a directory that has a whole system in it."""
    units: Mapping[str, Seen[str]]
    """ActiveState by unit name, of the units that vendors name in `services`; Absent if there is no such unit."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """By PCI address: what the kernel log said about GPUs that stopped answering."""
    detached: frozenset[str] = frozenset()
    """PCI addresses of detached GPUs."""
    driver: DriverSettings = field(default_factory=DriverSettings)
    machines: Mapping[str, MachineSettings] = field(default_factory=dict)
    """By name: some things are observed only if a machine asks for them."""


@dataclass(frozen=True, slots=True)
class DriverForPods:
    """The user space of a driver that machines on this host get."""

    vendor: str
    version: str
    interfaces: Mapping[str, str] = field(default_factory=dict)
    """Versions of its interfaces, such as CUDA, by name: users choose images by them."""
    unknown: str = ""
    """Why those are unknown; empty if they are known."""


@dataclass(frozen=True, slots=True)
class GpuError:
    """An error of one GPU that its driver wrote into the kernel's log."""

    pci_address: str
    number: int
    """The driver's own; for NVIDIA the Xid, below 1000."""
    meaning: str
    """What the driver calls it and what it is, with what to do where something is to be done."""
    of_application: bool
    """A program's own fault: it says nothing of the GPU."""
    lost: bool


class HostVendor(ABC):
    """One vendor on the host. The defaults are those of a vendor without that feature."""

    name: str
    always_handed = False
    """Whether the handoff includes it even without a GPU. Machine halves of older releases know only such vendors."""
    drivers: tuple[str, ...] = ()
    """Kernel drivers, by their names on the PCI bus, whose GPUs machines can be given."""
    own_nodes: frozenset[DeviceKind] = frozenset()
    """Kinds of a GPU's own nodes: a process that has none of them open does not use the GPU."""
    services: tuple[str, ...] = ()
    """Units whose state `observe` needs."""
    module_names: tuple[str, ...] = ()
    """Patterns (fnmatch) of the kernel modules that it needs, as /sys/module names them."""
    node_names: tuple[str, ...] = ()
    """Patterns (fnmatch) of names in /dev: `observe` must run when such an entry comes, goes or changes."""
    node_directories: tuple[str, ...] = ()
    """Directories, possibly missing, in which all names matter in that way."""
    image = "agent-ubuntu2404"
    """In containerfiles/: the machine image with the vendor's programs that the machine half runs."""
    symptoms: Mapping[tuple[ConditionType, str], str] = {}
    """What users see of a False condition, by condition and reason; an empty reason stands for any other."""
    library_names: tuple[str, ...] = ()
    """Patterns of the files in `library_directories` that show which user space is installed."""

    @abstractmethod
    def observe(self, sources: Sources) -> VendorFacts:
        """Observe everything of this vendor; what cannot be observed is Unseen, never an exception."""

    @abstractmethod
    def grant(
        self, facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]
    ) -> Grant:
        """Return what a machine with these settings gets; `wanted`: its GPUs, including detached ones. Pure."""

    def library_directories(self, driver: DriverSettings) -> tuple[str, ...]:
        """Return where such files may come and go; the directories may be missing. Pure."""
        return ()

    def wrong_driver(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        """Return GPUs that another driver took first, because a setting of the host is missing. Pure."""
        return ()

    def conditions(self, facts: VendorFacts, grant: Grant) -> tuple[Condition, ...]:
        """Return DriverLoaded to PersistenceMode, with the next step where something is missing. Pure."""
        return ()

    def driver_for_pods(self, facts: VendorFacts, system: System) -> DriverForPods | None:
        """Return the driver whose user space pods get from the host; None if there is none."""
        return None

    def letting_go(self, command: str, pci_address: str, *, in_machine: bool) -> str:
        """Say how a vendor's own program, named as in /proc/PID/comm, releases a GPU; else empty. Pure."""
        return ""

    def kernel_message(self, text: str) -> GpuError | None:
        """Return the GPU error that a line of the kernel log reports; None for any other line. Pure."""
        return None
