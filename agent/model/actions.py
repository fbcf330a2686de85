"""Steps from the current state to the goal. Data only: `agent.host.apply.steps` runs them, `plan` prints them."""

from typing import ClassVar, Literal, TypeAlias

from msgspec import Struct

from agent.model.device_allow import DeviceAllow
from agent.model.driver_root import StagedRoot
from agent.model.live import LiveSettings

ActionKind: TypeAlias = Literal["write", "remove", "stage", "mount", "reload", "change"]
"""The label of an action in metrics. It is never reworded, unlike the sentence of `describe()`, which is for people."""


class WriteFile(Struct, frozen=True):
    """Replace a file atomically; parents are created with mode 0755."""

    kind: ClassVar[ActionKind] = "write"
    path: str
    content: bytes
    mode: int = 0o644

    def describe(self) -> str:
        return f"write {self.path} ({len(self.content)} bytes)"


class RemoveFile(Struct, frozen=True):
    """Remove a file or symbolic link that the agent wrote."""

    kind: ClassVar[ActionKind] = "remove"
    path: str

    def describe(self) -> str:
        return f"remove {self.path}"


class StageDriverRoot(Struct, frozen=True):
    """Copy a driver's user-space files into a new driver root, and publish it once it is complete."""

    kind: ClassVar[ActionKind] = "stage"
    root: StagedRoot

    def describe(self) -> str:
        size = sum(file.size for file in self.root.files)
        return (
            f"stage {self.root.vendor} driver {self.root.version} as driver root {self.root.index} "
            f"({len(self.root.files)} files, {size / 1e6:.0f} MB)"
        )


class PublishDriverRoot(Struct, frozen=True):
    """Mount a staged driver root where machines see it; if mounts do not work, move it there as a plain directory."""

    kind: ClassVar[ActionKind] = "mount"
    root: StagedRoot

    def describe(self) -> str:
        return f"mount driver root {self.root.index} ({self.root.vendor} driver {self.root.version})"


class ProtectDriverRoots(Struct, frozen=True):
    """Mount driver roots in place of the plain directories that were published while mounts did not work."""

    kind: ClassVar[ActionKind] = "mount"
    indices: tuple[int, ...]

    def describe(self) -> str:
        return f"mount driver roots in place of plain directories: {', '.join(map(str, self.indices))}"


class RemoveDriverRoot(Struct, frozen=True):
    """Remove a driver root of the agent, with its manifest."""

    kind: ClassVar[ActionKind] = "remove"
    index: int
    what: str
    """For people: the vendor and version of the driver in the root, or that the root is incomplete."""

    def describe(self) -> str:
        return f"remove driver root {self.index} ({self.what}), which nothing uses"


class RemoveStaleStaging(Struct, frozen=True):
    """Remove the directories that an interrupted staging or removal of a driver root left."""

    kind: ClassVar[ActionKind] = "remove"
    paths: tuple[str, ...]

    def describe(self) -> str:
        return f"remove leftovers of driver roots: {', '.join(self.paths)}"


class ReloadUnits(Struct, frozen=True):
    """Make systemd read its unit files again, as `systemctl daemon-reload` does."""

    kind: ClassVar[ActionKind] = "reload"

    def describe(self) -> str:
        return "reload systemd's units"


class ChangeDevices(Struct, frozen=True):
    """Change which devices a running machine may open, and bind the nodes that it does not have."""

    kind: ClassVar[ActionKind] = "change"
    machine: str
    before: LiveSettings
    after: LiveSettings
    foreign: tuple[DeviceAllow, ...]
    """Entries of the unit's DeviceAllow= list that the agent did not add. They stay."""
    read_only: frozenset[str] = frozenset()
    """Paths of nodes to bind read-only."""

    @property
    def rebinds(self) -> bool:
        """Whether all nodes are bound again, because the machine reported some missing."""
        return self.after.rebound not in ("", self.before.rebound)

    def describe(self) -> str:
        before, after = self.before, self.after
        parts = [
            ("permit", [str(entry) for entry in after.allow if entry not in before.allow]),
            ("forbid", [str(entry) for entry in before.allow if entry not in after.allow]),
            ("bind", [path for path, number in after.nodes.items() if before.nodes.get(path) != number]),
            ("no longer bind", [path for path in before.nodes if path not in after.nodes]),
        ]
        changes = "; ".join(f"{verb} {', '.join(things)}" for verb, things in parts if things)
        return f"change the devices of machine {self.machine}: {changes or 'update the record of its devices'}"


Cleanup: TypeAlias = RemoveDriverRoot | RemoveStaleStaging
"""Steps that remove driver roots or leftovers of them. No machine waits for these steps."""
Publishing: TypeAlias = StageDriverRoot | PublishDriverRoot | ProtectDriverRoots
"""Steps that must be done before a handoff may name a driver root."""
Action: TypeAlias = WriteFile | RemoveFile | Publishing | Cleanup | ReloadUnits | ChangeDevices


class Done(Struct, frozen=True):
    """An action that was carried out."""

    kind: ActionKind
    sentence: str
    """What the action's `describe()` returned."""
