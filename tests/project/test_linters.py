"""The linters are tests, so one command is the whole gate."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from integration.bed.cache import cache_root, locked

REPOSITORY = Path(__file__).resolve().parents[2]


def check(*argv: str | Path) -> None:
    finished = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.processes
@pytest.mark.parametrize("argument", ["check", "format --check"])
def test_ruff(argument: str) -> None:
    check(sys.executable, "-m", "ruff", *argument.split(), ".")


@pytest.mark.processes
def test_mypy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cache of integration/test, which all checkouts share.

    mypy believes the size and time of a file whose path is in its cache, so the paths say which checkout it is. For
    another one's file, mypy compares the digest of its content.
    """
    if "MYPY_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("MYPY_CACHE_DIR", str(cache_root() / "mypy"))
    checked = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    with locked("mypy"):
        check(sys.executable, "-m", "mypy", *(REPOSITORY / each for each in checked))


@pytest.mark.processes
def test_shellcheck() -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed (apt install shellcheck)")
    listed = subprocess.run(["git", "grep", "-lE", "^#!.*(bash|/sh)"], cwd=REPOSITORY, capture_output=True, text=True)
    scripts = [name for name in listed.stdout.split() if not name.endswith((".py", ".md"))]
    check("shellcheck", "-x", *scripts)
