"""`plan --diff` shows what changes in files, and `plan --json` the steps for programs."""

import errno
import json
import os

from agent.cli.output import difference
from agent.model.goal import ReloadUnits, RemoveFile, WriteFile
from agent.model.paths import nspawn_file
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host

PATH = "/etc/example.conf"


def shown(host: Host, action: WriteFile | RemoveFile | ReloadUnits) -> list[str]:
    return list(difference(action, host))


def test_a_changed_file(host: Host) -> None:
    host.file(PATH, "one\ntwo\n")
    assert shown(host, WriteFile(PATH, b"one\nthree\n")) == [
        f"--- {PATH}", f"+++ {PATH}", "@@ -1,2 +1,2 @@", " one", "-two", "+three",
    ]  # fmt: skip


def test_a_new_file_and_a_removed_one(host: Host) -> None:
    assert shown(host, WriteFile(PATH, b"one\n")) == ["--- /dev/null", f"+++ {PATH}", "@@ -0,0 +1 @@", "+one"]
    host.file(PATH, "one\n")
    assert shown(host, RemoveFile(PATH)) == [f"--- {PATH}", "+++ /dev/null", "@@ -1 +0,0 @@", "-one"]


def test_a_file_that_is_written_again(host: Host) -> None:
    host.file(PATH, "one\n")
    assert shown(host, WriteFile(PATH, b"one\n")) == [f"# {PATH}: the same content, written again"]


def test_a_file_that_not_everybody_may_read_is_not_shown(host: Host) -> None:
    (line,) = shown(host, WriteFile(PATH, b"secret\n", 0o600))
    assert "secret" not in line
    assert "0600" in line


def test_what_may_not_be_read_is_unknown(host: Host) -> None:
    host.file(PATH, "one\n")
    host.failing[PATH] = PermissionError(errno.EACCES, os.strerror(errno.EACCES), PATH)
    assert shown(host, WriteFile(PATH, b"two\n")) == [f"# cannot show the difference: {PATH}: Permission denied"]


def test_a_file_cannot_write_to_the_terminal(host: Host) -> None:
    host.file(PATH, "\x1b[2J\n")
    assert "-\\x1b[2J" in shown(host, WriteFile(PATH, b"two\n"))


def test_other_steps_change_no_file(host: Host) -> None:
    assert shown(host, ReloadUnits()) == []


def test_the_plan_with_differences(gpu_host: Host, capsys: Capture) -> None:
    assert command(reconciler(gpu_host), "plan --diff") == 0
    lines = capsys.readouterr().out.splitlines()
    place = lines.index(f"+++ {nspawn_file(MACHINE)}")
    assert lines[place - 2].startswith(f"would write {nspawn_file(MACHINE)}")
    assert "+BindReadOnly=/dev/nvidia0" in lines
    assert "would start machine gpu-node" in lines


def test_the_plan_for_programs(gpu_host: Host, capsys: Capture) -> None:
    assert command(reconciler(gpu_host), "plan --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["exceptions"], found["problems"]) == (1, [], [])
    assert {each["kind"] for each in found["steps"]} >= {"write", "stage", "start"}
