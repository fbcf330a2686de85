"""The interface of a vendor to the host half.

All methods are pure, except `observe` and `driver_for_pods`, which read but never write.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Set

from msgspec import Struct, field

from agent.config.settings import DriverSettings, MachineSettings
from agent.model.cluster import Cluster
from agent.model.conditions import Condition, ConditionType
from agent.model.device import DeviceKind
from agent.model.facts import CacheEntry, DrmDevice, Gpu, PciDevice, Seen, VendorFacts
from agent.model.finding import Finding
from agent.model.goal import DriverRoots, Grant
from agent.model.handoff import FabricAnswer
from agent.system.file_cache import FileCache
from agent.system.files import System


class Sources(Struct, frozen=True):
    """What each pass reads once for all vendors. Each vendor selects what concerns its own GPUs."""

    system: System
    architecture: str
    pci: Seen[tuple[PciDevice, ...]]
    drm: Seen[tuple[DrmDevice, ...]]
    loader_cache: Callable[[str], Seen[tuple[CacheEntry, ...]]]
    """Returns the loader cache of a root file system: `/`, or a directory such as a driver container's root."""
    units: Mapping[str, Seen[str]]
    """ActiveState of the units in the vendors' `services`, by unit name; Absent for a unit that does not exist."""
    started: Callable[[str], Seen[int]] = lambda name: 0
    """Returns when one of these units last became active, in microseconds since the host booted; 0 if it has not."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """What the kernel log said about each GPU that stopped answering, by PCI address. sysfs still lists such a GPU."""
    detached: frozenset[str] = frozenset()
    """PCI addresses of detached GPUs."""
    driver: DriverSettings = field(default_factory=DriverSettings)
    machines: Mapping[str, MachineSettings] = field(default_factory=dict)
    """Settings by machine name. Some things are observed only if a machine's settings request them."""
    file_cache: FileCache = field(default_factory=FileCache)
    """Results of earlier passes, for observations of many files that seldom change."""


class FabricReport(Struct, frozen=True):
    """What a machine reported of its GPUs' registration with the NVLink fabric."""

    answers: tuple[FabricAnswer, ...] = ()
    silence: str = "the machine has not reported"
    """Why the GPUs that are not in `answers` have not answered."""
    remembered: tuple[FabricAnswer, ...] = ()
    """What the GPUs that are not in `answers` said last. To say nothing is not to say that all is well."""


class DriverForPods(Struct, frozen=True):
    """The driver whose user space machines on this host get."""

    vendor: str
    version: str
    interfaces: Mapping[str, str] = field(default_factory=dict)
    """Versions of the driver's interfaces, by interface, such as CUDA. Users choose images by these versions."""
    unknown: str = ""
    """Why the interfaces' versions are unknown; empty if they are known."""


class GpuError(Struct, frozen=True):
    """An error of one GPU that its driver wrote into the kernel log."""

    pci_address: str
    number: int
    """The driver's number for the error; for NVIDIA the Xid, which is below 1000."""
    meaning: str
    """The driver's name for the error, what it means, and what to do if anything needs to be done."""
    from_application: bool
    """Whether a program caused the error. If so, the GPU may be healthy."""
    lost: bool
    """Whether the error means that the GPU stopped answering."""
    fault: str = ""
    """If no new pod should get the GPU after this error, one word for the error, such as `Xid79`; otherwise empty."""


class HostVendor(ABC):
    """One vendor on the host. A vendor that lacks a feature keeps the defaults of that feature."""

    name: str
    in_every_handoff = False
    """Whether handoffs include the vendor even if the host has none of its GPUs."""
    drivers: tuple[str, ...] = ()
    """Names of kernel drivers on the PCI bus. Machines can get GPUs that have one of these drivers, or no driver."""
    own_nodes: frozenset[DeviceKind] = frozenset()
    """Kinds of nodes that show which processes use a GPU. Each node of these kinds belongs to one GPU. Every process
    that uses a GPU has at least one of that GPU's own nodes open."""
    services: tuple[str, ...] = ()
    """Units whose state `observe` needs."""
    module_names: tuple[str, ...] = ()
    """Patterns (fnmatch) of the vendor's kernel modules, as /sys/module names them."""
    node_names: tuple[str, ...] = ()
    """Patterns (fnmatch) of names in /dev. When such an entry appears, disappears or changes, `observe` must run."""
    node_directories: tuple[str, ...] = ()
    """Directories, some perhaps missing. When any entry in them appears, disappears or changes, `observe` must run."""
    image = "agent-ubuntu2404"
    """The machine image in containerfiles/ with the programs that the machine half runs for this vendor."""
    symptoms: Mapping[tuple[ConditionType, str], str] = {}
    """Symptoms of a False condition, by condition and reason. An empty reason stands for all reasons of the condition
    that have no entry of their own."""
    library_names: tuple[str, ...] = ()
    """Patterns (fnmatch) of the files in `library_directories` that show which user space is installed."""

    @abstractmethod
    def observe(self, sources: Sources) -> VendorFacts:
        """Return all facts about this vendor. What cannot be observed is Unseen, never an exception."""

    @abstractmethod
    def grant(
        self, facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]
    ) -> Grant:
        """Return what a machine with these settings gets. Pure.

        `wanted` has the machine's GPUs, including detached ones.
        """

    def library_directories(self, driver: DriverSettings) -> tuple[str, ...]:
        """Return the directories, some perhaps missing, where files with `library_names` appear and disappear. Pure."""
        return ()

    def misbound_gpus(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        """Return the GPUs that, by a mistake in the host's setup, have a driver that is not in `drivers`. Pure."""
        return ()

    def conditions(self, facts: VendorFacts, grant: Grant, fabric: FabricReport) -> tuple[Condition, ...]:
        """Return DriverLoaded, DevicesPresent, LibrariesPresent, FabricReady and PersistenceMode. Pure.

        The vendor of non-GPU devices returns none. The message of a False condition says what to do next.
        """
        return ()

    def driver_for_pods(self, facts: VendorFacts, system: System) -> DriverForPods | None:
        """Return the driver whose user space pods get from the host.

        Return None if pods get no user space from the host, or if that could not be observed.
        """
        return None

    def remedies(self, kind: ConditionType, reason: str, facts: VendorFacts, modules: Set[str]) -> tuple[str, ...]:
        """Return the commands that fix the fault behind a condition; nothing if no commands are known for it. Pure.

        `kind` and `reason` are the condition's. `modules` are the kernel's loaded modules.
        """
        return ()

    def cluster_findings(self, cluster: Cluster) -> Iterable[Finding]:
        """Return the faults of a cluster that keep its pods from the vendor's GPUs. Pure."""
        return ()

    def node_labels(self, driver: DriverForPods | None) -> Mapping[str, str]:
        """Return the labels for the Node of a machine that has the vendor's GPUs. Pure."""
        return {}

    def release_advice(self, command: str, pci_address: str, *, in_machine: bool) -> str:
        """Return how to make one of the vendor's programs release a GPU; empty for any other program. Pure.

        `command` is the program's name as in /proc/PID/comm. `in_machine` says where the program runs: in a machine or
        on the host.
        """
        return ""

    def parse_kernel_message(self, text: str) -> GpuError | None:
        """Return the GPU error that a line of the kernel log reports; None for any other line. Pure."""
        return None
