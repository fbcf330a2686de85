"""What should be: a pure function of configuration and facts, as frozen data."""

from dataclasses import dataclass

from agent.facts import DeviceNode, ServiceDirectory, StagedRoot
from agent.granted import Granted
from agent.handoff import Handoff, Variable
from agent.live import LiveSettings


@dataclass(frozen=True, slots=True)
class Share:
    """PCI addresses of GPUs, for one machine; `has` also where its settings do not ask for a number of them."""

    taken: frozenset[str] = frozenset()
    """Of other machines."""
    has: frozenset[str] = frozenset()
    """What the machine has now, and keeps as far as the number goes."""
    draining: frozenset[str] = frozenset()
    """Those of them that are granted to nobody, and that its processes may go on to use until they end."""


@dataclass(frozen=True, slots=True)
class DriverRoots:
    """What a vendor may choose a machine's driver root from."""

    staged: tuple[StagedRoot, ...]
    present: int | None = None
    """Index of the one that the machine's present handoff names."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What one vendor wants exposed to one machine."""

    vendor: str
    gpus: tuple[str, ...] = ()
    """PCI addresses."""
    nodes: tuple[DeviceNode, ...] = ()
    driver_files: bool = True
    """Whether its GPUs are of no use without user-space files of the host."""
    driver_root: StagedRoot | None = None
    """None where there are no such files that may be used now."""
    waiting_root: StagedRoot | None = None
    """Of the files that the host has by now, while `driver_root` serves, until the kernel module is reloaded."""
    detached: tuple[str, ...] = ()
    """PCI addresses of GPUs that it would be granted, if no administrator took them out of use."""
    services: tuple[str, ...] = ()
    """Names of daemons whose sockets it may use, whether or not they run."""
    directories: tuple[ServiceDirectory, ...] = ()
    """Of those that run."""
    cdi_modes: tuple[str, ...] = ()
    """In which its generator makes further CDI specs."""
    environment: tuple[Variable, ...] = ()
    """What pods get with any of its devices."""
    problems: tuple[str, ...] = ()
    """What was asked for and cannot be granted, one sentence each."""
    lacking: tuple[str, ...] = ()
    """What was asked for beside GPUs and is not there, in words: it stands in the way of nothing else."""


@dataclass(frozen=True, slots=True)
class OwnedFile:
    """A file that only this agent writes."""

    path: str
    content: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class MachineGoal:
    """One machine's files on the host, and what is handed to its own half."""

    name: str
    grants: tuple[Grant, ...]
    nspawn: OwnedFile
    drop_in: OwnedFile
    handoff: Handoff
    handoff_file: OwnedFile
    granted: Granted
    """By that handoff."""
    live: LiveSettings
    """What the machine has of these settings once it runs with them."""
    lacking: tuple[str, ...] = ()
    """What it is to have mounted and is not there, in words."""

    @property
    def generation(self) -> str:
        """The handoff's, which is not made anew here: that takes longer than to plan all else."""
        return self.granted.generation


@dataclass(frozen=True, slots=True)
class Goal:
    """Everything that this host should have."""

    driver_roots: tuple[StagedRoot, ...]
    """What the handoffs name."""
    machines: tuple[MachineGoal, ...]
    waiting_roots: tuple[StagedRoot, ...] = ()
    """What no handoff names yet: a kernel module of that version is not loaded."""

    def files(self) -> tuple[OwnedFile, ...]:
        """Every owned file, in the order in which they are written: the handoff last."""
        settings = [file for machine in self.machines for file in (machine.nspawn, machine.drop_in)]
        return (*settings, *(machine.handoff_file for machine in self.machines))
