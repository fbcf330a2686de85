"""The agent and its locked dependencies as Python wheels for the virtual machine, which has no network."""

import subprocess
import sys
from pathlib import Path

from integration.bed.cache import REPOSITORY, cached

PYTHON = "3.13"
"""Of Debian 13, the simulated GPU host."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def dependencies() -> Path:
    """A directory of the wheels that requirements.lock pins, checked by their hashes."""
    lock = REPOSITORY / "requirements.lock"

    def build(target: Path) -> None:
        options = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", "--require-hashes"]
        for platform in PLATFORMS:
            options += ["--platform", platform]
        pip("download", *options, "--dest", str(target), "--requirement", str(lock))

    return cached("wheels", [lock, PYTHON, *PLATFORMS], build)


def agent() -> Path:
    """The agent's own wheel, built from this checkout."""

    def build(target: Path) -> None:
        pip("wheel", "--no-deps", "--wheel-dir", str(target), str(REPOSITORY))

    sources = [REPOSITORY / "agent", REPOSITORY / "pyproject.toml", REPOSITORY / "README.md"]
    return next(cached("agent-wheel", sources, build).glob("*.whl"))
