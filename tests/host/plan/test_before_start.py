"""What a machine's unit does by itself before each start, run by a real shell; the agent has no part in it."""

import fcntl
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from agent.config.nspawn_settings import NspawnSettings
from agent.config.settings import MachineSettings
from agent.host.plan.before_start import before_start
from agent.host.plan.nspawn import render_nspawn
from agent.host.plan.unit_drop_in import render_drop_in
from agent.host.state.remains import clear_remains
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import DeviceNode, ServiceDirectory
from agent.model.paths import (
    HOST_NVIDIA,
    PASS_LOCK,
    handoff_directory,
    nspawn_file,
    report_directory,
    rewritten_nspawn,
    started_drop_in,
    started_nspawn,
    unit_drop_in,
)
from agent.system.files import System
from tests.fakes.host import ScriptedRunner

MACHINE = "gpu-node"
PLACES = ("/etc/systemd", "/run/unbounded-agent", "/var/lib/unbounded-agent")

pytestmark = pytest.mark.processes


def scripts(root: Path) -> list[str]:
    """As systemd gives them to the shell (systemd.syntax(7), systemd.service(5)), with our places below `root`."""
    drop_in = render_drop_in(MACHINE, MachineSettings(), ()).decode()
    lines = [line for line in drop_in.replace("\\\n", " ").splitlines() if line.startswith("ExecStartPre=")]
    found = []
    for line in lines:
        command, quoted, end = line.split("'")
        assert (command, end) == ("ExecStartPre=-+/bin/sh -c ", "")
        text = quoted.replace("\\\\", "\\").replace("%%", "%").replace("$$", "$")
        for place in PLACES:
            text = text.replace(place, f"{root}{place}")
        found.append(text)
    return found


def start(root: Path) -> None:
    """Until systemd-nspawn would be started. What mounts is noted, as not everybody may."""
    programs = root / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("mount", "umount"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{root}/mounts\n')
        (programs / name).chmod(0o755)
    for script in scripts(root):
        subprocess.run(
            ["/bin/sh", "-c", script], env={"PATH": f"{programs}:{os.environ['PATH']}"}, check=False, timeout=30
        )


def settings(root: Path, *sources: str, theirs: tuple[str, ...] = ()) -> bytes:
    """Of a machine that has these paths below `root` as nodes, and what its configuration says of further ones."""
    nodes = tuple(DeviceNode(f"{root}{path}", DeviceKind.GPU, DeviceNumber(195, 0)) for path in sources)
    extra: dict[str, dict[str, str | list[str]]] = {"Files": {"Bind": [f"{root}{path}" for path in theirs]}}
    directories = (ServiceDirectory("fabricmanager", f"{root}/run/a:b c", 1),)
    nspawn = NspawnSettings(kmsg=False, modules=False, extra=extra if theirs else {})
    content = render_nspawn(MACHINE, nspawn, nodes, directories)
    for place in PLACES:
        content = content.replace(f"={place}".encode(), f"={root}{place}".encode())
    file = root / nspawn_file(MACHINE)[1:]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return content


def written(root: Path) -> bytes:
    return (root / nspawn_file(MACHINE)[1:]).read_bytes()


def test_what_a_machine_has_mounted_is_there_without_the_agent(tmp_path: Path) -> None:
    start(tmp_path)
    for path in (HOST_NVIDIA, handoff_directory(MACHINE), report_directory(MACHINE)):
        assert (tmp_path / path[1:]).is_dir()
    report = f"{tmp_path}{report_directory(MACHINE)}"
    options = "size=1m,nr_inodes=64,mode=0755,nosuid,nodev,noexec"
    assert (tmp_path / "mounts").read_text().splitlines() == [
        f"umount -l {report}",
        f"mount -t tmpfs -o {options} unbounded-agent-report {report}",
    ]


def test_only_what_is_missing_is_taken_out_and_it_comes_back(tmp_path: Path) -> None:
    present, late = "/dev/nvidia0", "/dev/by-path/pci-0000:01:00.0\\b"
    for path in ("/run/a:b c", present):
        (tmp_path / path[1:]).mkdir(parents=True)
    whole = settings(tmp_path, present, late)
    start(tmp_path)
    (gone,) = [line for line in whole.splitlines() if b"by-path" in line]
    assert gone.endswith(rb"pci-0000\:01\:00.0\\b")
    assert written(tmp_path) == whole.replace(gone, b"#missing:" + gone)
    (tmp_path / late[1:]).mkdir(parents=True)
    start(tmp_path)
    assert written(tmp_path) == whole
    assert not [each for each in os.listdir(tmp_path / "etc/systemd/nspawn") if each.startswith(".")]


def test_settings_of_which_nothing_is_missing_are_not_written(tmp_path: Path) -> None:
    for path in ("/run/a:b c", "/dev/nvidia0"):
        (tmp_path / path[1:]).mkdir(parents=True)
    settings(tmp_path, "/dev/nvidia0")
    start(tmp_path)
    before = (tmp_path / nspawn_file(MACHINE)[1:]).stat()
    start(tmp_path)
    assert (tmp_path / nspawn_file(MACHINE)[1:]).stat() == before


def test_a_configured_line_stays_as_nspawn_refuses_a_start_without_its_source(tmp_path: Path) -> None:
    settings(tmp_path, theirs=("/srv/data",))
    start(tmp_path)
    assert f"\nBind={tmp_path}/srv/data\n".encode() in written(tmp_path)


@pytest.mark.parametrize("content", [None, b""])
def test_no_settings_are_made_up(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / nspawn_file(MACHINE)[1:]
    if content is not None:
        settings(tmp_path)
        file.write_bytes(content)
    start(tmp_path)
    assert file.exists() == (content is not None)
    assert content is None or not file.read_bytes()


def test_what_a_machine_starts_with_is_copied(tmp_path: Path) -> None:
    settings(tmp_path, "/dev/nvidia0")
    drop_in = tmp_path / unit_drop_in(MACHINE)[1:]
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Service]\n")
    start(tmp_path)
    assert (tmp_path / started_nspawn(MACHINE)[1:]).read_bytes() == written(tmp_path)
    assert (tmp_path / started_drop_in(MACHINE)[1:]).read_text() == "[Service]\n"
    drop_in.unlink()
    start(tmp_path)
    assert not (tmp_path / started_drop_in(MACHINE)[1:]).exists(), "none of an earlier start"


def test_a_pass_that_goes_on_is_waited_for(tmp_path: Path) -> None:
    """Else the shell could put back what the pass has just replaced, with nodes that were taken back."""
    settings(tmp_path, "/dev/nvidia0")
    lock = tmp_path / PASS_LOCK[1:]
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        starting = threading.Thread(target=start, args=(tmp_path,))
        starting.start()
        time.sleep(1)
        later = settings(tmp_path, "/dev/nvidia1")
    starting.join()
    (gone,) = [line for line in later.splitlines() if b"nvidia1" in line]
    assert b"#missing:" + gone in written(tmp_path)
    assert b"nvidia0" not in written(tmp_path)


def test_a_lock_that_cannot_be_opened_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / PASS_LOCK[1:]).mkdir(parents=True)
    settings(tmp_path, "/dev/nvidia0")
    start(tmp_path)
    assert b"#missing:" in written(tmp_path)


def test_only_root_may_open_the_lock_that_it_makes(tmp_path: Path) -> None:
    """Whoever could hold it would hold up every pass."""
    settings(tmp_path)
    start(tmp_path)
    assert (tmp_path / PASS_LOCK[1:]).stat().st_mode & 0o777 == 0o600


def test_a_pass_clears_away_what_a_killed_shell_left(tmp_path: Path) -> None:
    (script,) = [line for line in before_start(MACHINE) if "mv -f" in line]
    assert script.partition("mv -f ")[2].split()[0] == rewritten_nspawn(MACHINE)
    system = System(ScriptedRunner(), str(tmp_path))
    system.write(nspawn_file(MACHINE), b"whole")
    system.write(rewritten_nspawn(MACHINE), b"half")
    clear_remains(system, (MACHINE,))
    assert system.entries("/etc/systemd/nspawn") == ("gpu-node.nspawn",)
