"""What a vendor offers to the host half. Data in, data out, but for `observe`, which looks and never writes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agent.conditions import Condition, ConditionType
from agent.config import DriverSettings, MachineSettings
from agent.facts import CacheEntry, DrmDevice, Gpu, GpuError, PciDevice, Seen, StagedRoot, VendorFacts
from agent.goal import DriverRoots, Grant
from agent.identity import DeviceKind
from agent.system.files import System


@dataclass(frozen=True, slots=True)
class Sources:
    """What was listed once in this pass, for every vendor to pick its own from."""

    system: System
    architecture: str
    pci: Seen[tuple[PciDevice, ...]]
    drm: Seen[tuple[DrmDevice, ...]]
    loader_cache: Callable[[str], Seen[tuple[CacheEntry, ...]]]
    """Of a root: `/`, or a directory that has a whole system in it."""
    units: Mapping[str, Seen[str]]
    """ActiveState by unit name, of the units that vendors named in `services`; Absent when there is no such unit."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """What the kernel's log said, by PCI address, of GPUs that do not answer any more."""
    detached: frozenset[str] = frozenset()
    """PCI addresses of GPUs that an administrator takes out of use."""
    driver: DriverSettings = field(default_factory=DriverSettings)
    machines: Mapping[str, MachineSettings] = field(default_factory=dict)
    """By name: what is looked for only where a machine asks for it."""


@dataclass(frozen=True, slots=True)
class DriverForPods:
    """A driver's user space that machines of this host get."""

    vendor: str
    version: str
    interfaces: Mapping[str, str] = field(default_factory=dict)
    """Versions, by name, of what programs use it by, such as CUDA: images are chosen by them."""
    unknown: str = ""
    """Why those are not known, if they are not."""


class HostVendor(Protocol):
    """One vendor on the host."""

    name: str
    always_handed: bool
    """Whether machines hear of it also where there is no GPU of it: machine halves of older releases know no other."""
    drivers: tuple[str, ...]
    """Kernel drivers, by their names on the PCI bus, whose GPUs machines can be given."""
    own_nodes: frozenset[DeviceKind]
    """Of a GPU: who has none of these nodes open does not use it."""
    services: tuple[str, ...]
    """Units whose state `observe` wants to know."""
    module_names: tuple[str, ...]
    """Patterns (fnmatch) of the kernel modules that it needs, as /sys/module has them."""
    node_names: tuple[str, ...]
    """Patterns (fnmatch) of what is in /dev: what comes, goes or changes there, `observe` has to look at."""
    node_directories: tuple[str, ...]
    """Directories, which may be missing, where all names matter so."""
    image: str
    """In containerfiles/: the machine image that has the programs of the vendor's that its part in the machine runs."""
    symptoms: Mapping[tuple[ConditionType, str], str]
    """What users see of a condition that is False, by condition and reason; an empty reason stands for any other."""
    library_names: tuple[str, ...]
    """Patterns of the files that tell which user space is installed, in `library_directories`."""

    def library_directories(self, driver: DriverSettings) -> tuple[str, ...]:
        """Where these files may come and go; the directories may be missing. Pure."""
        ...

    def observe(self, sources: Sources) -> VendorFacts:
        """Look at everything of this vendor; what cannot be seen is Unseen, never an exception."""
        ...

    def grant(
        self, facts: VendorFacts, settings: MachineSettings, roots: DriverRoots, wanted: tuple[Gpu, ...]
    ) -> Grant:
        """What a machine with these settings gets, of which these GPUs were selected, with detached ones. Pure."""
        ...

    def wrong_driver(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        """Those that another driver took first, for want of a setting of the host. Pure."""
        ...

    def conditions(self, facts: VendorFacts, grant: Grant) -> tuple[Condition, ...]:
        """DriverLoaded to PersistenceMode, with the next step where something is missing. Pure."""
        ...

    def driver_for_pods(self, facts: VendorFacts, staged: Sequence[StagedRoot], system: System) -> DriverForPods | None:
        """None without a user space that pods would get of the host."""
        ...

    def letting_go(self, command: str, pci_address: str, *, in_machine: bool) -> str:
        """How a program of the vendor's own, named as in /proc/PID/comm, lets go of a GPU; else empty. Pure."""
        ...

    def kernel_message(self, text: str) -> GpuError | None:
        """The GPU's error that a line of the kernel's log tells of; None for any other line. Pure."""
        ...
