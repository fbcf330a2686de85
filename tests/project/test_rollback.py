"""`systemd/install --rollback` after a run that was killed. The real installation is in the tests of packages."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fakes.programs import program

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = ("a.service", "a.socket", "a.target", "70-unbounded-agent.rules", "unbounded-agent.conf")
KILLING = 'if rm "$0.kill" 2>/dev/null; then kill -9 "$PPID"; fi'
"""A systemd-tmpfiles that kills the installer once, after the links and before the services."""

FAILING = 'if rm "$0.fail" 2>/dev/null; then : >"$2"; exit 1; fi\nexec /bin/cp "$@"'
"""A cp that fails once, and leaves an empty file."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Installations 1, 2 and 3, and an installer that works below this directory."""
    script = (REPOSITORY / "systemd/install").read_text()
    for path in ("/opt/", "/usr/bin/", "/usr/local/lib/", "/usr/lib/", "/run/systemd/system"):
        script = script.replace(path, f"{tmp_path}{path}")
    (tmp_path / "install").write_text(script)
    for directory in ("usr/bin", "usr/lib"):
        (tmp_path / directory).mkdir(parents=True)
    for number in "123":
        installation = tmp_path / "opt/unbounded-agent" / number
        program(installation / "bin/unbounded-agent", f"echo release {number}")
        (installation / "host").mkdir()
        for name in FILES:
            (installation / "host" / name).touch()
    program(tmp_path / "bin/systemd-tmpfiles", KILLING)
    return tmp_path


def link(root: Path, **links: str) -> None:
    for name, target in links.items():
        (root / "opt/unbounded-agent" / name.replace("former", ".former")).symlink_to(target)


def install(root: Path, *arguments: str) -> int:
    environment = {**os.environ, "PATH": f"{root}/bin:{os.environ['PATH']}"}
    return subprocess.run(["bash", root / "install", *arguments], env=environment, check=False).returncode


def roll_back(root: Path) -> int:
    return install(root, "--rollback")


def installed(root: Path) -> dict[str, str]:
    return {each.name: os.readlink(each) for each in (root / "opt/unbounded-agent").iterdir() if each.is_symlink()}


def test_a_killed_rollback_is_finished_by_another_one(root: Path) -> None:
    link(root, current="2", previous="1")
    (root / "bin/systemd-tmpfiles.kill").touch()
    assert roll_back(root) == -signal.SIGKILL
    assert installed(root) == {"current": "1", "previous": "1", ".former": "2"}
    assert roll_back(root) == 0
    assert installed(root) == {"current": "1", "previous": "2"}


def test_a_killed_upgrade_is_undone(root: Path) -> None:
    link(root, current="3", previous="1", former="2")
    assert roll_back(root) == 0
    assert installed(root) == {"current": "2", "previous": "1"}


def test_a_file_that_could_not_be_copied_is_not_put_in_place(root: Path) -> None:
    """The disk is full for a moment."""
    link(root, current="2", previous="1")
    for number in "12":
        (root / "opt/unbounded-agent" / number / "host/a.service").write_text(f"# release {number}\n")
    program(root / "bin/cp", FAILING)
    (root / "bin/cp.fail").touch()
    assert roll_back(root) == 1
    assert installed(root) == {"current": "2", "previous": "1"}
    assert (root / "usr/local/lib/systemd/system/a.service").read_text() == "# release 2\n"
    assert roll_back(root) == 0
    assert (root / "usr/local/lib/systemd/system/a.service").read_text() == "# release 1\n"


@pytest.mark.parametrize(
    ("status", "refused"), [("installed", True), ("half-configured", True), ("config-files", False)]
)
def test_the_files_of_the_package_are_not_replaced(root: Path, status: str, refused: bool) -> None:
    """dpkg would not know, and the removal of the package would remove the program of this installation."""
    link(root, current="2", previous="1")
    program(root / "bin/dpkg-query", f"printf {status}")
    assert roll_back(root) == (1 if refused else 0)
    assert (root / "usr/bin/unbounded-agent").is_symlink() != refused


def test_the_distribution_s_python_is_used(root: Path) -> None:
    """root's PATH may begin with another one, in /root, where the service's sandbox does not let it run."""
    for directory in ("usr/bin", "bin"):
        program(root / directory / "python3", f"touch {root}/asked-{directory[:3]}\nexit 1")
    assert install(root) == 1
    assert [path.name for path in root.glob("asked-*")] == ["asked-usr"]
