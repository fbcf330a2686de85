"""What the packages' scripts do with units, as debhelper makes them. integration/tests/packages runs them in dpkg."""

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.model.paths import DRIVER_UPGRADE, DRIVER_UPGRADE_LOCK, PROVISION_LOCK
from tests.fakes.programs import program

REPOSITORY = Path(__file__).resolve().parents[2]
HOST, MACHINE, DRA = "unbounded-agent", "unbounded-agent-machine", "unbounded-agent-machine-dra"
CHANGELOG = """\
unbounded-agent (1.0) unstable; urgency=medium

  * Test.

 -- A <a@b.c>  Thu, 01 Jan 2026 00:00:00 +0000
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory `debian` of a build that has only the packages' units."""
    if shutil.which("dh_installsystemd") is None:
        pytest.skip("debhelper is not installed (apt install debhelper)")
    debian = tmp_path_factory.mktemp("source") / "debian"
    shutil.copytree(REPOSITORY / "deploy/debian", debian)
    (debian / "changelog").write_text(CHANGELOG)
    for directory in (REPOSITORY / "systemd", REPOSITORY / "systemd/machine"):
        for unit in directory.glob("*.*"):
            package = HOST if directory.name == "systemd" else DRA if "-dra." in unit.name else MACHINE
            target = debian / package / "lib/systemd/system"
            target.mkdir(parents=True, exist_ok=True)
            (debian / package / "usr/lib").mkdir(parents=True, exist_ok=True)
            if unit.is_file() and unit.suffix not in (".conf", ".rules"):
                shutil.copy(unit, target)
    (debian.parent / "agent").symlink_to(REPOSITORY / "agent")
    for rule in ("override_dh_installsystemd", "override_dh_installdeb"):
        subprocess.run(["make", "-f", "debian/rules", rule], cwd=debian.parent, check=True, capture_output=True)
    return debian


def invoked(
    scripts: Path, tmp_path: Path, package: str, script: str, *arguments: str, logged: str = "deb-systemd-invoke"
) -> list[list[str]]:
    """Run a script as dpkg does on a host where systemd runs. Return the arguments of each call of the logged program.

    By default, they are what systemd is to do with which units.
    """
    path = scripts / package / "DEBIAN" / script
    if not path.exists():
        return []
    log = tmp_path / "log"
    log.write_text("")
    for name in ("deb-systemd-invoke", "deb-systemd-helper", "systemctl"):
        program(tmp_path / "bin" / name, 'echo "$@" >>"$LOG"' if name == logged else "")
    (tmp_path / "run/systemd/system").mkdir(parents=True, exist_ok=True)
    text = re.sub(r"(?<!\w)/(etc|opt|run|usr/lib|usr/local|var)\b", rf"{tmp_path}/\1", path.read_text())
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LOG": str(log)}
    subprocess.run(["sh", "-c", text, script, *arguments], env=environment, check=True)
    return [line.split() for line in log.read_text().splitlines()]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("package", "unit"),
    [
        (HOST, "unbounded-agent.service"),
        (MACHINE, "unbounded-agent-gpu.timer"),
        (DRA, "unbounded-agent-dra.service"),
    ],
)
def test_an_upgrade_stops_nothing_and_restarts_what_runs(
    scripts: Path, tmp_path: Path, package: str, unit: str
) -> None:
    """What it stopped would not start again until the machine boots: an installation starts nothing."""
    for script, *arguments in (
        ("preinst", "install"),
        ("postinst", "configure", ""),
        ("prerm", "upgrade", "1.1"),
        ("preinst", "upgrade", "1.0", "1.1"),
        ("postrm", "upgrade", "1.1"),
    ):
        assert invoked(scripts, tmp_path, package, script, *arguments) == [], (script, *arguments)
    (action, *units), *_ = invoked(scripts, tmp_path, package, "postinst", "configure", "1.0")
    assert action == "try-restart"
    assert unit in units


@pytest.mark.processes
def test_an_upgraded_machine_can_drain_its_node_before_it_boots_again(scripts: Path, tmp_path: Path) -> None:
    """A release without this unit ran, so there is nothing to restart."""
    _, *further = invoked(scripts, tmp_path, MACHINE, "postinst", "configure", "1.0")
    assert further == [["start", "unbounded-agent-leave.path"]]


@pytest.mark.processes
@pytest.mark.parametrize("package", [MACHINE, DRA])
def test_a_removal_stops_every_unit_of_the_machine_half(scripts: Path, tmp_path: Path, package: str) -> None:
    ((action, *units),) = invoked(scripts, tmp_path, package, "prerm", "remove")
    assert action == "stop"
    installed = {path.name for path in (REPOSITORY / "systemd/machine").glob("*.*") if path.is_file()}
    assert set(units) == {name for name in installed if ("-dra." in name) == (package == DRA)}
    # Otherwise they would start the services again.
    kinds = [unit.rpartition(".")[2] for unit in units]
    assert kinds == sorted(kinds, key="service".__eq__)


@pytest.mark.processes
@pytest.mark.parametrize(("lock", "command"), [(DRIVER_UPGRADE_LOCK, "driver upgrade"), (PROVISION_LOCK, "switch")])
def test_a_removal_leaves_a_running_command_its_code(
    scripts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], lock: str, command: str
) -> None:
    """Without waiting. dpkg then keeps the package; nothing was stopped."""
    path = tmp_path / lock.removeprefix("/")
    path.parent.mkdir(parents=True)
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(subprocess.CalledProcessError):
            invoked(scripts, tmp_path, HOST, "prerm", "remove")
        said = capfd.readouterr().err.replace(str(tmp_path), "")
        assert f"{command}` " in said
        assert f"fuser {lock}" in said
        assert (tmp_path / "log").read_text() == ""
        invoked(scripts, tmp_path, HOST, "prerm", "upgrade", "1.1")
    ((action, *units), *_) = invoked(scripts, tmp_path, HOST, "prerm", "remove")
    assert (action, "unbounded-agent.service" in units) == ("stop", True)


@pytest.mark.processes
def test_a_removal_tells_of_an_upgrade_of_the_driver_that_was_interrupted(
    scripts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / DRIVER_UPGRADE.removeprefix("/")
    record.parent.mkdir(parents=True)
    record.touch()
    invoked(scripts, tmp_path, HOST, "prerm", "remove")
    assert "an upgrade of the driver is not finished" in capfd.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize("whose", ["a checkout", "the former release"])
def test_only_a_checkouts_units_are_to_be_removed(
    scripts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], whose: str
) -> None:
    """A former release that runs again has its units in the same place, and stays if the package is only configured."""
    unit = tmp_path / "usr/local/lib/systemd/system/unbounded-agent.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    former = tmp_path / "usr/lib/unbounded-agent/former"
    former.mkdir(parents=True)
    if whose == "the former release":
        (former / "went-back").touch()
    invoked(scripts, tmp_path, HOST, "postinst", "configure", "1.0")
    assert ("rm /usr/local/lib" in capfd.readouterr().err.replace(str(tmp_path), "")) is (whose == "a checkout")


@pytest.mark.processes
def test_a_purge_disables_no_service_of_a_checkout(scripts: Path, tmp_path: Path) -> None:
    """deb-systemd-helper removes the link that starts unbounded-agent.service at boot, whoever has the unit by now."""
    calls = invoked(scripts, tmp_path, HOST, "postrm", "purge", logged="deb-systemd-helper")
    assert "purge" in {call[0] for call in calls}
    (tmp_path / "opt/unbounded-agent/current").mkdir(parents=True)
    assert invoked(scripts, tmp_path, HOST, "postrm", "purge", logged="deb-systemd-helper") == []


@pytest.mark.parametrize("package", [HOST, MACHINE])
def test_the_program_that_removes_trees_is_in_the_script(scripts: Path, package: str) -> None:
    """When a package is purged, its own files are gone."""
    script = scripts / package / "DEBIAN/postrm"
    assert f"<<'END'\n{(REPOSITORY / 'agent/system/removal.py').read_text()}END\n" in script.read_text()
    subprocess.run(["sh", "-n", script], check=True)
