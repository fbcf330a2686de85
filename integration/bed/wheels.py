"""The agent and its locked dependencies as Python wheels for the virtual machine, which has no network."""

import os
import subprocess
import sys
from pathlib import Path

from integration.bed.architecture import CHOSEN
from integration.bed.cache import BUILD, REPOSITORY, cached
from integration.bed.process import CommandError

PYTHON = "3.13"
"""Debian 13's version."""
MANYLINUX = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1")
PLATFORMS = [f"{each}_{CHOSEN.processor}" for each in MANYLINUX]


def pip(*arguments: str, modules: Path | None = None) -> None:
    """Run pip. It and the build backends that it starts import from the directory `modules`."""
    environment = os.environ | BUILD | ({"PYTHONPATH": str(modules)} if modules else {})
    argv = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    if subprocess.run(argv, env=environment).returncode:
        raise CommandError(f"pip {arguments[0]} failed; see the lines above")


def dependencies(python: str = PYTHON) -> Path:
    """Return a directory of the wheels that requirements.lock pins for `python`, checked by their hashes."""
    lock = REPOSITORY / "requirements.lock"

    def build(target: Path) -> None:
        options = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--require-hashes"]
        for platform in PLATFORMS:
            options += ["--platform", platform]
        pip("download", *options, "--dest", str(target), "--requirement", str(lock))

    return cached(f"wheels-{python}", [lock, python, *PLATFORMS], build)


def build_backend() -> Path:
    """Return a directory of the modules that requirements-build.lock pins, checked by their hashes."""
    lock = REPOSITORY / "requirements-build.lock"

    def build(target: Path) -> None:
        pip("install", "--require-hashes", "--target", str(target), "--requirement", str(lock))

    return cached("build-backend", [lock, sys.version], build)


def agent() -> Path:
    """Return the agent's own wheel, built from this checkout."""
    backend = build_backend()

    def build(target: Path) -> None:
        options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(target))
        pip("wheel", *options, str(REPOSITORY), modules=backend)

    sources: list[Path | str] = [
        REPOSITORY / "agent",
        REPOSITORY / "deploy" / "version",
        REPOSITORY / "deploy" / "wheel.py",
        REPOSITORY / "pyproject.toml",
        REPOSITORY / "README.md",
        REPOSITORY / "LICENSE",
        str(backend),
    ]
    return next(cached("agent-wheel", sources, build).glob("*.whl"))
