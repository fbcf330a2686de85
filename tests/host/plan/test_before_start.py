"""A machine's unit prepares each start and stop by itself: its scripts, run by a real shell, without the agent."""

import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.config.settings import MachineSettings, NspawnSettings
from agent.host.plan.nspawn import STOP_ANSWER, render_drop_in, render_nspawn
from agent.model.device import DeviceKind, DeviceNumber
from agent.model.facts import DeviceNode, ServiceDirectory
from agent.model.paths import (
    HOST_NVIDIA,
    PASS_LOCK,
    STOPPING_NAME,
    handoff_directory,
    nspawn_file,
    report_directory,
    started_drop_in,
    started_nspawn,
    stop_mark,
    unit_drop_in,
)

MACHINE = "gpu-node"
PLACES = ("/etc/systemd", "/run/unbounded-agent", "/var/lib/unbounded-agent")

pytestmark = pytest.mark.processes


def scripts(root: Path, key: str = "ExecStartPre") -> list[str]:
    """Return the scripts as systemd gives them to the shell (systemd.syntax(7), systemd.service(5)), below `root`."""
    drop_in = render_drop_in(MACHINE, MachineSettings(), ()).decode()
    lines = [line for line in drop_in.replace("\\\n", " ").splitlines() if line.startswith(f"{key}=")]
    found = []
    for line in lines:
        command, quoted, end = line.split("'")
        assert (command, end) == (f"{key}=-+/bin/sh -c ", "")
        text = quoted.replace("\\\\", "\\").replace("%%", "%").replace("$$", "$")
        for place in PLACES:
            text = text.replace(place, f"{root}{place}")
        found.append(text)
    return found


def start(root: Path) -> None:
    """Run the scripts up to systemd-nspawn's start. Mounts are only recorded, because they need root."""
    programs = root / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("mount", "umount"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{root}/mounts\n')
        (programs / name).chmod(0o755)
    for script in scripts(root):
        subprocess.run(
            ["/bin/sh", "-c", script], env={"PATH": f"{programs}:{os.environ['PATH']}"}, check=False, timeout=600
        )


@contextmanager
def killed(argv: list[str], environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the process, which is killed at the end."""
    with subprocess.Popen(argv, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def stopping(root: Path, main: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the running script of a stop. `main` is the process ID of systemd-nspawn. A second takes 20 ms."""
    programs = root / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "sleep").write_text(f"#!/bin/sh\necho x >>{root}/seconds\nexec /bin/sleep 0.02\n")
    (programs / "sleep").chmod(0o755)
    for directory in (handoff_directory(MACHINE), report_directory(MACHINE)):
        (root / directory[1:]).mkdir(parents=True, exist_ok=True)
    (script,) = scripts(root, "ExecStop")
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "MAINPID": main}
    with killed(["/bin/sh", "-c", script], environment) as process:
        yield process


def seconds(root: Path) -> int:
    return len((root / "seconds").read_text().split()) if (root / "seconds").exists() else 0


def settings(root: Path, *sources: str, theirs: tuple[str, ...] = ()) -> bytes:
    """Write the settings of a machine with these paths below `root` as nodes, and `theirs` configured; return them."""
    nodes = tuple(DeviceNode(f"{root}{path}", DeviceKind.GPU, DeviceNumber(195, 0)) for path in sources)
    binds = [f"{root}{path}" for path in theirs]
    extra: dict[str, dict[str, str | list[str]]] = {"Exec": {"ResolvConf": "off"}, "Files": {"Bind": binds}}
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


def test_a_machines_mount_sources_exist_without_the_agent(tmp_path: Path) -> None:
    """Missing settings are not invented."""
    start(tmp_path)
    for path in (HOST_NVIDIA, handoff_directory(MACHINE), report_directory(MACHINE)):
        assert (tmp_path / path[1:]).is_dir()
    report = f"{tmp_path}{report_directory(MACHINE)}"
    options = "size=1m,nr_inodes=64,mode=0755,nosuid,nodev,noexec"
    assert (tmp_path / "mounts").read_text().splitlines() == [
        f"umount -l {report}",
        f"mount -t tmpfs -o {options} unbounded-agent-report {report}",
    ]
    file = tmp_path / nspawn_file(MACHINE)[1:]
    assert not file.exists()
    settings(tmp_path)
    file.write_bytes(b"")
    start(tmp_path)
    assert written(tmp_path) == b""


def test_only_missing_sources_are_commented_out_and_later_restored(tmp_path: Path) -> None:
    """But a configured line stays."""
    present, late = "/dev/nvidia0", "/dev/by-path/pci-0000:01:00.0\\b"
    for path in ("/run/a:b c", present):
        (tmp_path / path[1:]).mkdir(parents=True)
    whole = settings(tmp_path, present, late, theirs=("/srv/data",))
    assert f"\nBind={tmp_path}/srv/data\n".encode() in whole
    start(tmp_path)
    (gone,) = [line for line in whole.splitlines() if b"by-path" in line]
    assert gone.endswith(rb"pci-0000\:01\:00.0\\b")
    assert written(tmp_path) == whole.replace(gone, b"#missing:" + gone)
    (tmp_path / late[1:]).mkdir(parents=True)
    start(tmp_path)
    assert written(tmp_path) == whole
    assert not [each for each in os.listdir(tmp_path / "etc/systemd/nspawn") if each.startswith(".")]
    before = (tmp_path / nspawn_file(MACHINE)[1:]).stat()
    start(tmp_path)
    assert (tmp_path / nspawn_file(MACHINE)[1:]).stat() == before, "nothing is rewritten"
    mode = (tmp_path / PASS_LOCK[1:]).stat().st_mode
    assert mode & 0o777 == 0o600, "any user who could lock it would block every pass"


def test_the_settings_of_a_start_are_copied(tmp_path: Path) -> None:
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


def test_a_running_pass_is_waited_for(tmp_path: Path) -> None:
    """Otherwise the shell could restore what the pass has just replaced, including withdrawn nodes."""
    settings(tmp_path, "/dev/nvidia0")
    lock = tmp_path / PASS_LOCK[1:]
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        starting = threading.Thread(target=start, args=(tmp_path,))
        starting.start()
        time.sleep(0.2)
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


def test_a_stop_waits_while_the_machine_shuts_itself_down(tmp_path: Path) -> None:
    """It ends with systemd-nspawn, or when the machine half says that the shutdown was refused."""
    mark, answer = tmp_path / stop_mark(MACHINE)[1:], tmp_path / report_directory(MACHINE)[1:] / STOPPING_NAME
    for ended in ("the machine", "the answer"):
        with killed(["/bin/sleep", "600"]) as main, stopping(tmp_path, str(main.pid)) as stop:
            answer.symlink_to(".")
            before = seconds(tmp_path)
            while seconds(tmp_path) < before + 2 * STOP_ANSWER and stop.poll() is None:
                time.sleep(0.01)
            assert stop.poll() is None
            assert mark.is_dir()
            if ended == "the machine":
                main.kill()
                main.wait()
            else:
                answer.unlink()
            assert stop.wait(60) == 0
        answer.unlink(missing_ok=True)
        start(tmp_path)
        assert not mark.exists(), "it would shut down the machine that starts"


def test_a_machine_that_does_not_answer_is_stopped_as_without_the_agent(tmp_path: Path) -> None:
    """One without the machine half, or with an older one."""
    with stopping(tmp_path, str(os.getpid())) as stop:
        assert stop.wait(60) == 0
    assert seconds(tmp_path) == STOP_ANSWER


def test_a_stop_follows_no_link_of_the_machine(tmp_path: Path) -> None:
    """Root in the machine can write to the handoff."""
    mark = tmp_path / stop_mark(MACHINE)[1:]
    mark.parent.mkdir(parents=True)
    mark.symlink_to(tmp_path / "elsewhere")
    with stopping(tmp_path, str(os.getpid())) as stop:
        assert stop.wait(60) == 0
    assert not (tmp_path / "elsewhere").exists()
    assert seconds(tmp_path) == 0


def test_a_machine_that_has_ended_by_itself_is_not_asked(tmp_path: Path) -> None:
    with stopping(tmp_path, "") as stop:
        assert stop.wait(60) == 0
    assert not (tmp_path / stop_mark(MACHINE)[1:]).exists()
