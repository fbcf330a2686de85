"""What the Debian package removes when it is purged. integration/tests/packages has the rest."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.fakes.programs import program

SCRIPTS = Path(__file__).parents[2] / "deploy/debian"
REMOVAL = SCRIPTS.parents[1] / "agent/system/removal.py"
SETTINGS = "etc/systemd/nspawn/gpu-node.nspawn"
FILES = {
    SETTINGS: "# Written by unbounded-agent\n",
    "etc/systemd/system/systemd-nspawn@gpu-node.service.d/90-unbounded-agent.conf": "# Written by unbounded-agent\n",
    "run/systemd/system/unit": "",
}
SYSTEMCTL = """\
case "$*" in
    "show "*" systemd-nspawn@gpu-node.service") echo "ActiveState={state}" ;;
    "list-jobs "*" systemd-nspawn@gpu-node.service") printf "{jobs}" ;;
    *) [ "$*" = daemon-reload ] ;;
esac
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
BOTH = pytest.mark.parametrize("package", ["unbounded-agent", "unbounded-agent-machine"])
OWN_MOUNTS = ("unshare", "--mount", "--propagation", "private")
JOB = r"4711 systemd-nspawn@gpu-node.service {} waiting\n"


def write(tree: Path, *empty: str, **files: str) -> None:
    for name, content in {**dict.fromkeys(empty, ""), **files}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(content)


def purge(tree: Path, state: str, jobs: str = "", package: str = "unbounded-agent", mounting: str = "") -> str:
    """Run the script on files below `tree`, with these answers of systemctl. Return what it prints.

    `mounting` is run before it, in the same mount namespace, which nobody else sees.
    """
    script = (SCRIPTS / f"{package}.postrm").read_text()
    write(tree, **FILES)
    program(tree / "bin/systemctl", SYSTEMCTL.format(state=state, jobs=jobs))
    script = re.sub(r"(?<!\w)/(etc|opt|run|usr/lib|var)\b", rf"{tree}/\1", script)
    # As debian/rules does.
    script = script.replace("#REMOVAL#\n", REMOVAL.read_text())
    done = subprocess.run(
        [*(OWN_MOUNTS if mounting else ()), "sh", "-c", mounting + script, "postrm", "purge"],
        env={"PATH": f"{tree}/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


@pytest.mark.parametrize(
    ("state", "jobs", "kept"),
    [
        *(("activating", "", True), ("active", "", True), ("", "", True)),
        *(("inactive", JOB.format("start"), True), ("failed", JOB.format("restart"), True)),
        *(("deactivating", JOB.format("stop"), True), ("inactive", JOB.format("stop"), False)),
        *(("inactive", "", False), ("failed", "", False)),
    ],
)
def test_a_machine_that_runs_or_starts_keeps_its_settings(tmp_path: Path, state: str, jobs: str, kept: bool) -> None:
    """machined knows no machine that waits for prepare@, or for its next start."""
    assert ("the machine gpu-node is running or starting" in purge(tmp_path, state, jobs)) == kept
    assert (tmp_path / SETTINGS).exists() == kept


def test_a_machine_without_settings_does_not_start_at_boot(tmp_path: Path) -> None:
    """The template's -U would change the owners of its files. A machine with foreign settings starts as before."""
    wanted = tmp_path / "etc/systemd/system/machines.target.wants"
    wanted.mkdir(parents=True)
    for name in ("gpu-node", "b"):
        (wanted / f"systemd-nspawn@{name}.service").symlink_to("/usr/lib/systemd/system/systemd-nspawn@.service")
    message = purge(tmp_path, "inactive")
    assert "machine gpu-node no longer starts" in message
    assert "machinectl enable gpu-node" in message
    assert not (tmp_path / SETTINGS).exists()
    assert [link.name for link in wanted.iterdir()] == ["systemd-nspawn@b.service"]


@pytest.mark.parametrize("copy", ["as-found.json", "as-found.copy.json"])
def test_the_record_of_a_changed_host_stays(tmp_path: Path, copy: str) -> None:
    """`up` has changed the host and then failed, or was interrupted, before it made its first node."""
    record = f"var/lib/unbounded-agent/{copy}"
    write(tmp_path, record)
    assert "`unbounded-agent reset NAME`" in purge(tmp_path, "inactive")
    assert (tmp_path / record).exists()
    assert (tmp_path / SETTINGS).exists()


def test_each_node_that_is_left_is_named(tmp_path: Path) -> None:
    names = ("as-found.json", "nodes/a.json", "nodes/a.copy.json", "nodes/x.copy..json")
    write(tmp_path, *(f"var/lib/unbounded-agent/{name}" for name in names))
    assert re.findall(r"`unbounded-agent reset (.*)`", purge(tmp_path, "inactive")) == ["a", "x.copy"]


CLAIMS = "var/lib/unbounded-agent/dra/claims.json"


def test_what_the_wrong_package_left_is_purged_without_the_state_of_the_right_one(tmp_path: Path) -> None:
    """The packages conflict, so one of them replaced the other. dpkg still knows the scripts of the replaced one."""
    write(tmp_path / "right", CLAIMS)
    purge(tmp_path / "right", "", package="unbounded-agent-machine")
    assert not (tmp_path / "right/var/lib/unbounded-agent").exists()

    manifest = "var/lib/unbounded-agent/driver-roots/0.json"
    write(tmp_path / "host", "var/lib/unbounded-agent/machines/gpu-node/handoff/handoff.json", manifest)
    purge(tmp_path / "host", "", package="unbounded-agent-machine")
    assert (tmp_path / "host" / manifest).exists()

    handoff = "run/unbounded-agent/handoff/handoff.json"
    write(tmp_path / "machine", "usr/lib/unbounded-agent/agent/machine/run.py", CLAIMS, handoff)
    assert "this is a machine" in purge(tmp_path / "machine", "inactive")
    assert (tmp_path / "machine" / CLAIMS).exists()
    assert (tmp_path / "machine" / handoff).exists()


def test_an_installation_from_a_checkout_keeps_its_state(tmp_path: Path) -> None:
    """systemd/install refuses to replace the package, so its user removes that first, and may purge it later."""
    configuration = "etc/unbounded-agent/config.toml"
    write(tmp_path, "opt/unbounded-agent/current/bin/unbounded-agent", configuration)
    assert "an installation from a checkout" in purge(tmp_path, "inactive")
    assert (tmp_path / configuration).exists()
    assert (tmp_path / SETTINGS).exists()


STATE = "var/lib/unbounded-agent"
MOUNTS = {
    "in use": "mount --bind {data} {place}; exec 9<{place}/kept; ",
    "in use, and a space in its path": "mkdir '{place}/a b'; mount --bind {data} '{place}/a b'; "
    "exec 9<'{place}/a b/kept'; ",
    "in use, an overlay": "mount -t tmpfs none {place}; mkdir {place}/u {place}/w {place}/o; "
    "mount -t overlay none -o lowerdir={data},upperdir={place}/u,workdir={place}/w {place}/o; exec 9<{place}/o/kept; ",
}


@needs_root
@BOTH
@pytest.mark.parametrize("kind", MOUNTS)
def test_what_is_mounted_in_the_state_stays(tmp_path: Path, kind: str, package: str) -> None:
    """Data of a mount was deleted when it could not be unmounted. Its device number may be that of the state."""
    write(tmp_path, "data/kept", f"{STATE}/own/file", "etc/unbounded-agent/config.toml")
    place = tmp_path / STATE / "own"
    message = purge(
        tmp_path, "inactive", package=package, mounting=MOUNTS[kind].format(data=tmp_path / "data", place=place)
    )
    assert (tmp_path / "data/kept").exists()
    assert f"{tmp_path / STATE}: not removed, because something is mounted there: " in message
    assert f"{package}: what is named above stays" in message
    assert (tmp_path / STATE / "own/file").exists()
    assert (tmp_path / "etc/unbounded-agent").exists() is (package == "unbounded-agent-machine"), "the rest goes"


@needs_root
def test_what_is_not_in_use_is_unmounted(tmp_path: Path) -> None:
    write(tmp_path, "data/kept", f"{STATE}/own/file")
    mounting = f"mount --bind {tmp_path}/data {tmp_path}/{STATE}/own; "
    assert purge(tmp_path, "inactive", mounting=mounting) == ""
    assert not (tmp_path / STATE).exists()
    assert (tmp_path / "data/kept").exists()


OWN = "mkdir -p {data} {state}; mount {kind} {state}; touch {state}/a {state}/.b {state}/..c '{state}/d e'; "


@needs_root
@BOTH
@pytest.mark.parametrize("kind", ["-t tmpfs none", "--bind {data}"])
def test_a_file_system_for_the_state_is_emptied(tmp_path: Path, kind: str, package: str) -> None:
    """The units support one. The mount itself is the administrator's."""
    state, data = tmp_path / STATE, tmp_path / "data"
    mounting = OWN.format(kind=kind.format(data=data), state=state, data=data)
    script = f"trap 'ls -A {state} >{tmp_path}/left' EXIT; "
    assert purge(tmp_path, "inactive", package=package, mounting=mounting + script) == ""
    assert (tmp_path / "left").read_text() == ""
    assert state.is_dir()


@needs_root
@BOTH
def test_what_is_mounted_in_a_file_system_for_the_state_stays(tmp_path: Path, package: str) -> None:
    state, data = tmp_path / STATE, tmp_path / "data"
    write(tmp_path, "data/kept")
    mounting = OWN.format(kind="-t tmpfs none", state=state, data=data)
    below = f"mkdir {state}/own; mount --bind {data} {state}/own; exec 9<{state}/own/kept; "
    script = f"trap 'ls -A {state} >{tmp_path}/left' EXIT; "
    message = purge(tmp_path, "inactive", package=package, mounting=mounting + below + script)
    assert f"{state}/own: not removed, because something is mounted there: " in message
    assert (tmp_path / "left").read_text() == "own\n"
    assert (data / "kept").exists()


@needs_root
def test_a_link_to_a_mount_is_removed_itself(tmp_path: Path) -> None:
    """The administrator's data are in that file system."""
    state, data = tmp_path / STATE, tmp_path / "data"
    write(tmp_path, "data/kept", "place/mount-point")
    state.parent.mkdir(parents=True)
    mounting = f"mount --bind {data} {tmp_path}/place; ln -s {tmp_path}/place {state}; "
    purge(tmp_path, "inactive", mounting=mounting)
    assert (data / "kept").exists()
    assert not state.is_symlink()
