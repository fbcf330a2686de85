"""Other versions of the NVIDIA Container Toolkit than the one in the bed's machine (integration/bed/tools.py).

The Go client verifies them by the public checksum database, so they need no go.sum.
"""

from pathlib import Path

from integration.bed.cache import cached
from integration.bed.process import run
from integration.bed.tools import NVML_LINK, TOOLKIT, TOOLKIT_TOOLS, chosen, go, toolchain

NEWEST = "1.20.2"
PINNED = ("1.18.2", "1.20.1", NEWEST)
"""The oldest version that the agent accepts, and those that write something else than the bed's version."""
VERSIONS = (chosen("TOOLKIT"),) if chosen("TOOLKIT") else PINNED
"""What tests use."""


def toolkit_of(version: str) -> Path:
    """Return a directory with nvidia-ctk, nvidia-cdi-hook and nvidia-container-runtime of this version."""
    return cached(f"toolkit-{version}", [version], lambda output: _install(output, version))


def _install(output: Path, version: str) -> None:
    flags = f"-s -w '{NVML_LINK}' -X {TOOLKIT}/internal/info.version={version}"
    packages = [f"{tool.package}@v{version}" for tool in TOOLKIT_TOOLS]
    environment = {"GOBIN": str(output), "GOTOOLCHAIN": toolchain(), "GOWORK": "off", "CGO_ENABLED": "1"}
    build = ["-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", "-ldflags", flags]
    run([go(), "install", *build, *packages], env=environment)
