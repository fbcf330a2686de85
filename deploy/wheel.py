"""Gives the agent's wheel the version of this build (deploy/version). Only hatchling loads this file."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[1]


def version() -> str:
    """Return the version."""
    return subprocess.run([ROOT / "deploy" / "version"], check=True, capture_output=True, text=True).stdout.strip()


class Hook(BuildHookInterface):  # type: ignore[type-arg,misc,unused-ignore]
    """Replaces the version in the wheel's copy of agent/__init__.py."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the copy. `version` is the kind of wheel: an editable one stays a checkout."""
        if version == "editable":
            return
        text = (ROOT / "agent" / "__init__.py").read_text(encoding="utf-8")
        line = f'__version__ = "{self.metadata.version}"'
        with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as copy:
            copy.write(re.sub("^__version__ = .*", line, text, flags=re.MULTILINE))
        build_data["force_include"][copy.name] = "agent/__init__.py"
        self.copy = Path(copy.name)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copy."""
        if version != "editable":
            self.copy.unlink()
