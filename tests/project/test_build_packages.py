"""What `deploy/build-packages` keeps of a build that failed. integration/tests/packages builds the packages."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.fakes.programs import program

SCRIPT = Path(__file__).resolve().parents[2] / "deploy/build-packages"
PROGRAMS = ("dpkg-buildpackage", "dh", "dh_python3", "go-md2man", "unzip", "git")
PYTHON = """\
[ "$2" = venv ] || exit 0
mkdir -p "$3/bin"
cp "${0%/*}/pip" "$3/bin"
"""
"""A Python whose virtual environments have the pip below."""
PIP = """\
while [ $# -gt 0 ]; do
    case $1 in --python-version) version=$2 ;; --dest) directory=$2 ;; esac
    shift
done
mkdir -p "$directory"
touch "$directory/wheel-$version"
[ "$version" != 3.12 ]
"""
"""It loses its connection in the second of three downloads."""


@pytest.mark.processes
def test_an_incomplete_download_is_not_kept(tmp_path: Path) -> None:
    """A later build would take it, and make a package that lacks modules for one Python."""
    programs = {"dpkg": "echo amd64", "python3": PYTHON, "pip": PIP, **dict.fromkeys(PROGRAMS, "")}
    for name, text in programs.items():
        program(tmp_path / "bin" / name, text)
    script = tmp_path / "deploy/build-packages"
    script.parent.mkdir()
    script.write_text(SCRIPT.read_text().replace("/usr/bin/python3 -m", f"{tmp_path}/bin/python3 -m"))
    script.chmod(0o755)
    (tmp_path / "requirements.lock").touch()
    (tmp_path / "agent").symlink_to(SCRIPT.parents[1] / "agent")
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run([script], env=environment, capture_output=True, check=False)
    assert done.returncode != 0
    assert list((tmp_path / "build").iterdir()) == []
