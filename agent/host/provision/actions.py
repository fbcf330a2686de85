"""Steps of `up` and `reset`. Data only: `agent.host.provision.apply` prints each step, then runs it."""

from typing import TypeAlias

from msgspec import Struct

from agent.host.provision.record import NodeRecord
from agent.model.as_found import AsFound
from agent.model.network import Leftover
from agent.model.node import HostSettings, HostState, NodeBinary, NodeFile, NodeImage
from agent.model.paths import machine_root, machine_unit


class RecordHost(Struct, frozen=True):
    """Record the host as it was found, before anything changes it."""

    found: AsFound

    def describe(self) -> str:
        return "record the host as it was found"


class ChangeHost(Struct, frozen=True):
    """Set the host's kernel parameters, modules, swap and files."""

    goal: HostSettings
    before: HostState

    def describe(self) -> str:
        return "change the host's settings for the kubelet"


class StageRoot(Struct, frozen=True):
    """Pull the image and unpack it into the directory `staged`, which is not a machine yet.

    The FillRoot that follows calls this directory `unpacked`. What FillRoot calls `staged` is another directory.
    """

    image: NodeImage
    staged: str

    def describe(self) -> str:
        return f"pull and unpack {self.image.name} ({self.image.size / 1e6:.0f} MB compressed)"


class FetchBinaries(Struct, frozen=True):
    """Download the node's programs, or take them from the offline bundle, and verify them."""

    binaries: tuple[NodeBinary, ...]

    def describe(self) -> str:
        return f"fetch {', '.join(each.name for each in self.binaries)}"


class FillRoot(Struct, frozen=True):
    """Rename the unpacked root file system to `staged`, then put programs and files into it."""

    unpacked: str
    staged: str
    binaries: tuple[NodeBinary, ...]
    files: tuple[NodeFile, ...]

    def describe(self) -> str:
        programs = ", ".join(each.name for each in self.binaries) or "no programs"
        return f"put {programs} and {len(self.files)} files into the root file system"


class StopMachine(Struct, frozen=True):
    """Stop a machine, and wait until it has stopped."""

    machine: str

    def describe(self) -> str:
        return f"stop machine {self.machine}"


class PublishRoot(Struct, frozen=True):
    """Record the node, and give the complete root file system its final name."""

    machine: str
    staged: str
    record: NodeRecord

    def describe(self) -> str:
        return f"make {machine_root(self.machine)} from the complete root file system"


class GiveToken(Struct, frozen=True):
    """Give a bootstrap token to a machine that has not joined its cluster. This token replaces an earlier one."""

    machine: str
    where: str
    """The token's file, or `credential:NAME`."""

    def describe(self) -> str:
        return f"give machine {self.machine} the bootstrap token of {self.where}"


class RemoveTree(Struct, frozen=True):
    """Remove a root file system that is not a machine yet, or no longer is one."""

    path: str

    def describe(self) -> str:
        return f"remove {self.path}"


class RemoveRoot(Struct, frozen=True):
    """Remove a machine's root file system.

    It is renamed first: if the removal is interrupted, no machine can start from what is left.
    """

    machine: str

    @property
    def path(self) -> str:
        return machine_root(self.machine)

    def describe(self) -> str:
        return f"remove {self.path}"


class RemoveEmptyDirectory(Struct, frozen=True):
    """Remove a directory that was made for one of the agent's files, unless others have put files there."""

    path: str

    def describe(self) -> str:
        return f"remove {self.path}"


class RemoveDriverRoots(Struct, frozen=True):
    """Remove all staged drivers, which no machine needs any longer."""

    def describe(self) -> str:
        return "remove the staged drivers"


class EnableUnit(Struct, frozen=True):
    """Let the host start a unit at each boot, even without the agent."""

    unit: str

    def describe(self) -> str:
        return f"enable {self.unit}"


class DisableUnit(Struct, frozen=True):
    """Undo EnableUnit."""

    unit: str

    def describe(self) -> str:
        return f"disable {self.unit}"


class ForgetNode(Struct, frozen=True):
    """Remove the agent's state of a machine. The record of the node is removed last."""

    machine: str

    def describe(self) -> str:
        return f"remove the agent's state of machine {self.machine}"


class RestoreHost(Struct, frozen=True):
    """Set the host's settings back to what they were."""

    found: HostState
    now: HostState

    def describe(self) -> str:
        return "restore the host's settings"


class RemoveLeftover(Struct, frozen=True):
    """Remove what pods' networking left in the host's network."""

    leftover: Leftover

    def describe(self) -> str:
        return f"remove {self.leftover.describe()}"


class ForgetHost(Struct, frozen=True):
    """Remove the cache of fetched programs, then the record of the host as it was found."""

    def describe(self) -> str:
        return "remove the fetched programs and the record of the host as it was found"


Action: TypeAlias = (
    RecordHost
    | ChangeHost
    | StageRoot
    | FetchBinaries
    | FillRoot
    | StopMachine
    | GiveToken
    | PublishRoot
    | RemoveTree
    | RemoveRoot
    | RemoveDriverRoots
    | RemoveEmptyDirectory
    | EnableUnit
    | DisableUnit
    | ForgetNode
    | RestoreHost
    | RemoveLeftover
    | ForgetHost
)


def boot_units(machine: str) -> tuple[str, str]:
    """Return the units that make a machine start with the host: its own unit, and the target that starts that unit."""
    return machine_unit(machine), "machines.target"
