"""`make release`: what it builds, from two clones of one commit."""

import subprocess
from pathlib import Path

import pytest

from integration.bed.cache import REPOSITORY
from integration.bed.packages import EPOCH
from integration.bed.process import run

VERSION = "1.0"
PINS = "# A comment.\nBASE=docker.io/library/ubuntu@sha256:12\nSNAPSHOT=20261130T120000Z\nTOOLKIT=1.19.1-1\n"
FILES = {
    f"unbounded-agent-{VERSION}-amd64.cdx.json",
    f"unbounded-agent-{VERSION}-arm64.cdx.json",
    f"unbounded-agent-{VERSION}-recipes.tar.gz",
    f"unbounded-agent-machine-dra_{VERSION}_all.deb",
    f"unbounded-agent-machine_{VERSION}_all.deb",
    f"unbounded-agent-monitoring_{VERSION}_all.deb",
    f"unbounded-agent_{VERSION}_amd64.deb",
    f"unbounded-agent_{VERSION}_arm64.deb",
    f"unbounded_agent-{VERSION}-py3-none-any.whl",
    "SHA256SUMS",
}


def build(source: Path, directory: Path, umask: str, zone: str) -> Path:
    """Return the files of a release, built in a clone of `source` below `directory`, with nothing built before."""
    clone, output = directory / "clone", directory / "files"
    run(["git", "clone", "--quiet", "--no-local", source, clone])
    script = 'umask "$0"; exec "$1/deploy/release" "$2"'
    environment = {"VERSION": VERSION, "SOURCE_DATE_EPOCH": EPOCH, "TZ": zone}
    run(["sh", "-c", script, umask, clone, output], env=environment)
    return output


def pinned_checkout(directory: Path) -> Path:
    """Return a clone of this checkout that has pins, as after `make pins`."""
    run(["git", "clone", "--quiet", "--no-local", REPOSITORY, directory])
    (directory / "deploy/pins").write_text(PINS)
    run(["git", "add", "deploy/pins"], cwd=directory)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    run(["git", *identity, "commit", "--quiet", "--allow-empty", "--message=c"], cwd=directory)
    return directory


@pytest.mark.exhaustive
def test_a_release_is_whole_and_the_same_from_every_clone(tmp_path: Path) -> None:
    """Another directory, umask and time zone change no byte. An image can be built from what is there."""
    source = pinned_checkout(tmp_path / "source")
    first = build(source, tmp_path / "a", "022", "UTC")
    second = build(source, tmp_path / "b", "077", "Asia/Tokyo")
    assert {path.name for path in first.iterdir()} == FILES
    run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=first)
    assert (first / "SHA256SUMS").read_text() == (second / "SHA256SUMS").read_text()
    run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=second)

    run(["tar", "--extract", "--file", first / f"unbounded-agent-{VERSION}-recipes.tar.gz", "--directory", tmp_path])
    recipe = tmp_path / f"unbounded-agent-{VERSION}" / "containerfiles" / "build"
    assert recipe.with_name("pins").read_text() == PINS
    missing = subprocess.run([recipe, "--packages", tmp_path, "agent-ubuntu2404"], capture_output=True, text=True)
    assert "has no package unbounded-agent-machine" in missing.stderr
