"""What the machine half remembers between its runs.

Notes live in MACHINE_STATE, on the machine's own /run: lost at each boot of the machine, and only there to save work.
The ownership record is on disk, since what we wrote into /etc outlives a boot.
"""

import json
from typing import Any

from agent.paths import MACHINE_STATE, OWNED
from agent.system.files import System


class Notes:
    """JSON objects by name. One that is missing or damaged is an empty one."""

    def __init__(self, system: System) -> None:
        self._system = system

    def load(self, name: str) -> dict[str, Any]:
        return _load(self._system, f"{MACHINE_STATE}/{name}.json")

    def save(self, name: str, value: dict[str, Any]) -> None:
        if self.load(name) != value:
            self._system.write(f"{MACHINE_STATE}/{name}.json", json.dumps(value).encode(), 0o600)


class Owned:
    """The paths outside of /run that only we write; whatever else is there is somebody's and stays."""

    def __init__(self, system: System) -> None:
        self._system = system
        paths = _load(system, OWNED).get("paths", [])
        self._paths = {path for path in paths if isinstance(path, str)} if isinstance(paths, list) else set()

    @property
    def paths(self) -> tuple[str, ...]:
        """All of them, sorted, whether or not they are there."""
        return tuple(sorted(self._paths))

    def may_write(self, path: str) -> bool:
        return path in self._paths or not self._system.exists(path)

    def has(self, path: str) -> bool:
        return path in self._paths

    def ending(self, suffixes: tuple[str, ...]) -> tuple[str, ...]:
        """Paths of ours, sorted, by how they end."""
        return tuple(path for path in sorted(self._paths) if path.endswith(suffixes))

    def claim(self, path: str) -> None:
        """Before the first write: a crash in between leaves a claim on nothing, not a file that nobody owns."""
        if path not in self._paths:
            self._paths.add(path)
            self._save()

    def remove(self, path: str) -> bool:
        """Remove a file of ours; False when it is not ours or not there."""
        if path not in self._paths:
            return False
        removed = self._system.exists(path)
        self._system.remove(path)
        self._paths.discard(path)
        self._save()
        return removed

    def _save(self) -> None:
        self._system.write(OWNED, json.dumps({"paths": sorted(self._paths)}).encode() + b"\n")


def _load(system: System, path: str) -> dict[str, Any]:
    try:
        value = json.loads(system.read(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
