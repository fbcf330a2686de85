"""What deploy/release refuses. integration/tests/packages/test_release.py builds a release."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fakes.programs import program

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.processes


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit, whose deploy/build-packages fails."""
    directory = tmp_path / "checkout"
    for name in ("deploy/release", "deploy/version", "agent/__init__.py", "agent/system/removal.py"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, directory / name)
    (directory / ".gitignore").write_text("dist/\nbuild/\n")
    program(directory / "deploy/build-packages", "touch $3/half.deb\necho build >&2\nexit 1")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "--message=c"]):
        subprocess.run(["git", "-C", directory, *command], check=True)
    return directory


def release(checkout: Path, *arguments: str | Path) -> str:
    """Return what the failing command says."""
    done = subprocess.run([checkout / "deploy/release", *arguments], capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr


def test_only_what_is_committed_is_released(checkout: Path, tmp_path: Path) -> None:
    (checkout / "agent/new.py").touch()
    assert "commit or remove these first, a release is built from a commit:\n?? agent/new.py" in release(checkout)
    (checkout / "agent/new.py").unlink()
    assert release(checkout, tmp_path / "files") == "build\n"
    # A release that failed leaves nothing that blocks the next.
    for _ in range(2):
        assert release(checkout) == "build\n"
        assert list((checkout / "build").iterdir()) == []


def test_files_of_another_release_do_not_get_into_it(checkout: Path, tmp_path: Path) -> None:
    """SHA256SUMS would name them."""
    (tmp_path / "old.deb").touch()
    assert release(checkout, tmp_path) == f"error: {tmp_path} is not empty; name another directory\n"


@pytest.mark.parametrize("name", ["build-packages", "release"])
def test_root_builds_from_another_users_checkout(name: str) -> None:
    """Otherwise, git refuses it: dubious ownership."""
    calls = re.findall(r"(?:^|\$\()git .{22}", (REPOSITORY / "deploy" / name).read_text(), re.MULTILINE)
    assert calls
    assert [each for each in calls if "git -c safe.directory='*'" not in each] == []
