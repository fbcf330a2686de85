"""deploy/version: the version that packages, wheels and images get from a checkout."""

import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.version import Version

from agent import __version__

REPOSITORY = Path(__file__).resolve().parents[2]
IDENTITY = {
    **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    "GIT_CONFIG_GLOBAL": "/dev/null",
}
RELEASE = __version__.partition("+")[0]
"""The release that this checkout leads to."""
PUBLIC = re.compile(r"\d+\.\d+\.\d+(\.dev\d{14})?(\+[a-z0-9]+(\.[a-z0-9]+)*)?")
"""A version of PEP 440 in its normal form, as pip and dpkg keep it."""

pytestmark = pytest.mark.processes


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with what is needed, and one commit."""
    directory = tmp_path / "checkout"
    for name in ("deploy/version", "agent/__init__.py"):
        (directory / name).parent.mkdir(parents=True)
        shutil.copy(REPOSITORY / name, directory / name)
    git(directory, "init", "--quiet")
    commit(directory, "2026-01-02T03:04:05+01:00")
    return directory


def git(directory: Path, *arguments: str, **variables: str) -> str:
    environment = {**os.environ, **IDENTITY, **variables}
    done = subprocess.run(["git", "-C", directory, *arguments], env=environment, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode().strip()


def commit(directory: Path, time: str) -> None:
    git(directory, "add", "--all")
    times = {"GIT_AUTHOR_DATE": time, "GIT_COMMITTER_DATE": time}
    git(directory, "commit", "--quiet", "--allow-empty", "--message=c", **times)


def version(directory: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "VERSION"} | variables
    command = [directory / "deploy/version"]
    done = subprocess.run(command, cwd="/", env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = done.stdout.strip()
    assert PUBLIC.fullmatch(found)
    return found


def test_each_commit_and_each_change_has_its_own(checkout: Path) -> None:
    first = version(checkout)
    name = git(checkout, "rev-parse", "--short=8", "HEAD")
    assert first == version(checkout, TZ="Asia/Tokyo") == f"{RELEASE}.dev20260102020405+g{name}"
    (checkout / "agent/other.py").touch()
    assert version(checkout) == first, "an editor's file changes nothing"
    with (checkout / "agent/__init__.py").open("a") as file:
        file.write("# changed\n")
        file.flush()
        changed = version(checkout)
        file.write("# again\n")
    again = version(checkout)
    assert changed.startswith(f"{first}.d")
    (settings := checkout.parent / "gitconfig").write_text("[diff]\nnoprefix = true\n")
    assert again == version(checkout, GIT_CONFIG_GLOBAL=str(settings))
    commit(checkout, "2026-01-02T03:04:06+01:00")
    assert len({first, changed, again, version(checkout)}) == 4


def test_the_tag_is_the_release_unless_another_version_is_chosen(checkout: Path) -> None:
    git(checkout, "tag", f"v{RELEASE}")
    assert version(checkout) == RELEASE
    assert version(checkout, VERSION="2.0.0") == "2.0.0"
    git(checkout, "tag", "--annotate", "--message=another", "v0.0.9")
    assert version(checkout) == RELEASE


def test_what_follows_the_release_sorts_after_it(checkout: Path) -> None:
    """Otherwise, apt would take a newer build for an older one."""
    before = version(checkout)
    git(checkout, "tag", "--annotate", "--message=release", f"v{RELEASE}")
    found = [before, version(checkout)]
    with (checkout / "agent/__init__.py").open("a") as file:
        file.write("# changed\n")
    found.append(version(checkout))
    assert re.fullmatch(re.escape(RELEASE) + r"\+0\.g[0-9a-f]{8}\.d[0-9a-f]{8}", found[-1])
    for number in range(1, 11):
        commit(checkout, f"2026-01-02T03:04:{number:02}+01:00")
        found.append(version(checkout))
        assert found[-1] == f"{RELEASE}+{number}.g{git(checkout, 'rev-parse', '--short=8', 'HEAD')}"
    found.append(f"{RELEASE.rpartition('.')[0]}.99.dev20260102020405+g12345678")
    for earlier, later in pairwise(each.replace(".dev", "~dev") for each in found):
        subprocess.run(["dpkg", "--compare-versions", earlier, "lt", later], check=True)
    assert [str(each) for each in sorted(map(Version, found))] == found


def test_an_archive_says_that_it_is_one(checkout: Path) -> None:
    """Also inside of another repository."""
    inner = checkout / "unpacked"
    for name in ("deploy", "agent"):
        shutil.copytree(checkout / name, inner / name)
    assert version(inner) == f"{RELEASE}+source"


def test_a_checkout_says_that_it_is_one() -> None:
    """Each build replaces this line."""
    assert __version__.endswith("+checkout")
    assert PUBLIC.fullmatch(__version__)
    assert re.search('^__version__ = "', (REPOSITORY / "agent/__init__.py").read_text(), re.MULTILINE)
