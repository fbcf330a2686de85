"""Steps from what is to what should be. Data only: `agent.apply` does them, `plan` prints them."""

from dataclasses import dataclass
from typing import TypeAlias

from agent.facts import StagedRoot
from agent.live import LiveSettings


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Replace a file atomically; parents are created with mode 0755."""

    path: str
    content: bytes
    mode: int = 0o644

    def describe(self) -> str:
        return f"write {self.path} ({len(self.content)} bytes)"


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """Remove a file or symbolic link that is ours."""

    path: str

    def describe(self) -> str:
        return f"remove {self.path}"


@dataclass(frozen=True, slots=True)
class StageDriverRoot:
    """Copy a driver's user-space files into a driver root of ours and publish it whole."""

    root: StagedRoot

    def describe(self) -> str:
        size = sum(file.size for file in self.root.files)
        return (
            f"stage {self.root.vendor} driver {self.root.version} as driver root {self.root.index} "
            f"({len(self.root.files)} files, {size / 1e6:.0f} MB)"
        )


@dataclass(frozen=True, slots=True)
class RemoveDriverRoot:
    """Take a driver root of ours away, with its manifest."""

    index: int
    what: str
    """What it holds, for people."""

    def describe(self) -> str:
        return f"remove driver root {self.index} ({self.what}), which nothing uses"


@dataclass(frozen=True, slots=True)
class ClearRemains:
    """Remove what an interrupted staging or removal of a driver root left."""

    paths: tuple[str, ...]

    def describe(self) -> str:
        return f"remove what was left of driver roots: {', '.join(self.paths)}"


@dataclass(frozen=True, slots=True)
class ReloadUnits:
    """systemctl daemon-reload."""

    def describe(self) -> str:
        return "reload systemd's units"


@dataclass(frozen=True, slots=True)
class ChangeDevices:
    """Change what devices a running machine may open, and bind the nodes that it lacks."""

    machine: str
    before: LiveSettings
    after: LiveSettings
    others: tuple[str, ...]
    """Entries of the unit's DeviceAllow= list that are not ours: they stay."""

    @property
    def binds_anew(self) -> bool:
        """Whether it binds all nodes once more, as the machine said that it lacks some."""
        return self.after.rebound not in ("", self.before.rebound)

    def describe(self) -> str:
        before, after = self.before, self.after
        parts = [
            ("permit", [entry for entry in after.allow if entry not in before.allow]),
            ("forbid", [entry for entry in before.allow if entry not in after.allow]),
            ("bind", [path for path, number in after.nodes.items() if before.nodes.get(path) != number]),
            ("forget", [path for path in before.nodes if path not in after.nodes]),
        ]
        told = "; ".join(f"{verb} {', '.join(things)}" for verb, things in parts if things)
        return f"change the devices of machine {self.machine}: {told or 'note what it has'}"


Clearing: TypeAlias = RemoveDriverRoot | ClearRemains
"""What no machine waits for."""
Action: TypeAlias = WriteFile | RemoveFile | StageDriverRoot | Clearing | ReloadUnits | ChangeDevices
