"""Steps from what is to what should be. Data only: `agent.apply` does them, `plan` prints them."""

from dataclasses import dataclass
from typing import TypeAlias

from agent.facts import StagedRoot


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
class ReloadUnits:
    """systemctl daemon-reload."""

    def describe(self) -> str:
        return "reload systemd's units"


Action: TypeAlias = WriteFile | RemoveFile | StageDriverRoot | ReloadUnits
