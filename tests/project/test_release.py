"""What deploy/release refuses, and from which releases upgrades are tested. integration/tests/packages builds one."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agent import __version__
from integration.bed.packages import RELEASES
from tests.fakes.programs import program

REPOSITORY = Path(__file__).resolve().parents[2]
SECTION_LIMIT = 120
"""Lines of the changelog for one release."""

pytestmark = pytest.mark.processes


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit, whose deploy/build-packages fails."""
    directory = tmp_path / "checkout"
    for name in ("deploy/release", "deploy/version", "agent/__init__.py", "agent/system/removal.py"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, directory / name)
    (directory / ".gitignore").write_text("dist/\nbuild/\n")
    (directory / "CHANGELOG.md").write_text("## [0.2.0] - Unreleased\n\n## [0.1.0] - 2026-11-30\n")
    program(directory / "deploy/build-packages", "touch $3/half.deb\necho build >&2\nexit 1")
    git(directory, "init", "--quiet")
    commit(directory)
    return directory


def git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", checkout, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def commit(checkout: Path) -> str:
    git(checkout, "add", "--all")
    git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "--message=c")
    return git(checkout, "rev-parse", "HEAD")


def release(checkout: Path, *arguments: str | Path, **variables: str) -> str:
    """Return what the failing command says."""
    environment = os.environ | variables
    done = subprocess.run([checkout / "deploy/release", *arguments], capture_output=True, text=True, env=environment)
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


def test_the_changelog_says_when_it_was_released(checkout: Path) -> None:
    said = "error: CHANGELOG.md says that 0.2.0 is unreleased; write the day there, commit, and tag that commit\n"
    assert release(checkout, VERSION="0.2.0") == said
    assert release(checkout, VERSION="0.1.0") == "build\n"


def test_each_release_has_a_section_that_a_user_reads() -> None:
    """The one that the checkout leads to has one too, before its day is known."""
    sections = re.split(r"^## ", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    heading = re.compile(r"\[(\d+\.\d+\.\d+)\] - (Unreleased|20\d\d-\d\d-\d\d)\n")
    versions = [found[1] for found in map(heading.match, sections) if found]
    assert len(set(versions)) == len(sections)
    assert versions[0] == __version__.partition("+")[0]
    assert max(len(each.splitlines()) for each in sections) <= SECTION_LIMIT


def earlier_releases(checkout: Path) -> dict[str, str]:
    """Return the releases before this commit, by version, with their commits. There are none without git's data."""
    asked = ["git", "-c", "safe.directory=*", "-C", str(checkout)]
    form = "--format=%(refname:strip=2) %(if)%(*objectname)%(then)%(*objectname)%(else)%(objectname)%(end)"
    listing = [*asked, "for-each-ref", "--merged=HEAD", form, "refs/tags/v*"]
    found = subprocess.run(listing, capture_output=True, text=True).stdout.splitlines()
    head = subprocess.run([*asked, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    tags = dict(line.removeprefix("v").split() for line in found)
    return {version: each for version, each in tags.items() if each != head}


def test_upgrades_are_tested_from_each_earlier_release(checkout: Path) -> None:
    """If this fails after a release, add its commit to RELEASES in integration/bed/packages.py, as it is shown here."""
    assert earlier_releases(REPOSITORY).items() <= RELEASES.items()
    assert earlier_releases(checkout) == {}
    git(checkout, "tag", "v0.1.0")
    assert earlier_releases(checkout) == {}
    tagged = git(checkout, "rev-parse", "HEAD")
    later = commit(checkout)
    assert earlier_releases(checkout) == {"0.1.0": tagged}
    git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "tag", "--annotate", "--message=b", "v0.2.0")
    commit(checkout)
    assert earlier_releases(checkout) == {"0.1.0": tagged, "0.2.0": later}


@pytest.mark.parametrize("name", ["build-packages", "release"])
def test_root_builds_from_another_users_checkout(name: str) -> None:
    """Otherwise, git refuses it: dubious ownership."""
    calls = re.findall(r"(?:^|\$\()git .{22}", (REPOSITORY / "deploy" / name).read_text(), re.MULTILINE)
    assert calls
    assert [each for each in calls if "git -c safe.directory='*'" not in each] == []
