"""Steps from the current state to the goal. Data only: `agent.host.apply.steps` runs them, `plan` prints them."""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from agent.model.device_allow import DeviceAllow
from agent.model.facts import StagedRoot
from agent.model.live import LiveSettings

ActionKind: TypeAlias = Literal["write", "remove", "stage", "mount", "reload", "change"]
"""The label of an action in metrics. It is never reworded, unlike the sentence of `describe()`, which is for people."""


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Replace a file atomically; parents are created with mode 0755."""

    kind: ClassVar[ActionKind] = "write"
    path: str
    content: bytes
    mode: int = 0o644

    def describe(self) -> str:
        return f"write {self.path} ({len(self.content)} bytes)"


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """Remove a file or symbolic link that the agent wrote."""

    kind: ClassVar[ActionKind] = "remove"
    path: str

    def describe(self) -> str:
        return f"remove {self.path}"


@dataclass(frozen=True, slots=True)
class StageDriverRoot:
    """Copy a driver's user-space files into a new driver root, and publish it once it is complete."""

    kind: ClassVar[ActionKind] = "stage"
    root: StagedRoot

    def describe(self) -> str:
        size = sum(file.size for file in self.root.files)
        return (
            f"stage {self.root.vendor} driver {self.root.version} as driver root {self.root.index} "
            f"({len(self.root.files)} files, {size / 1e6:.0f} MB)"
        )


@dataclass(frozen=True, slots=True)
class PublishDriverRoot:
    """Mount a staged driver root where machines see it; if mounts do not work, move it there as a plain directory."""

    kind: ClassVar[ActionKind] = "mount"
    root: StagedRoot

    def describe(self) -> str:
        return f"mount driver root {self.root.index} ({self.root.vendor} driver {self.root.version})"


@dataclass(frozen=True, slots=True)
class ProtectDriverRoots:
    """Mount driver roots in place of the plain directories that were published while mounts did not work."""

    kind: ClassVar[ActionKind] = "mount"
    indices: tuple[int, ...]

    def describe(self) -> str:
        return f"mount driver roots in place of plain directories: {', '.join(map(str, self.indices))}"


@dataclass(frozen=True, slots=True)
class RemoveDriverRoot:
    """Remove a driver root of the agent, with its manifest."""

    kind: ClassVar[ActionKind] = "remove"
    index: int
    what: str
    """For people: the vendor and version of the driver in the root, or that the root is incomplete."""

    def describe(self) -> str:
        return f"remove driver root {self.index} ({self.what}), which nothing uses"


@dataclass(frozen=True, slots=True)
class RemoveStaleStaging:
    """Remove the directories that an interrupted staging or removal of a driver root left."""

    kind: ClassVar[ActionKind] = "remove"
    paths: tuple[str, ...]

    def describe(self) -> str:
        return f"remove leftovers of driver roots: {', '.join(self.paths)}"


@dataclass(frozen=True, slots=True)
class ReloadUnits:
    """Make systemd read its unit files again, as `systemctl daemon-reload` does."""

    kind: ClassVar[ActionKind] = "reload"

    def describe(self) -> str:
        return "reload systemd's units"


@dataclass(frozen=True, slots=True)
class ChangeDevices:
    """Change which devices a running machine may open, and bind the nodes that it does not have."""

    kind: ClassVar[ActionKind] = "change"
    machine: str
    before: LiveSettings
    after: LiveSettings
    foreign: tuple[DeviceAllow, ...]
    """Entries of the unit's DeviceAllow= list that the agent did not add. They stay."""

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


@dataclass(frozen=True, slots=True)
class Done:
    """An action that was carried out."""

    kind: ActionKind
    sentence: str
    """What the action's `describe()` returned."""
