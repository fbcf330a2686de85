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


def test_how_a_step_is_shown(host: Host) -> None:
    assert shown(host, ReloadUnits()) == []
    assert shown(host, WriteFile(PATH, b"one\n")) == ["--- /dev/null", f"+++ {PATH}", "@@ -0,0 +1 @@", "+one"]
    host.file(PATH, "one\n")
    assert shown(host, RemoveFile(PATH)) == [f"--- {PATH}", "+++ /dev/null", "@@ -1 +0,0 @@", "-one"]
    assert shown(host, WriteFile(PATH, b"one\n")) == [f"# {PATH}: the same content, written again"]
    host.file(PATH, "one\n\x1b[2J\n")
    changed = ["@@ -1,2 +1,2 @@", " one", "-\\x1b[2J", "+three"]
    assert shown(host, WriteFile(PATH, b"one\nthree\n")) == [f"--- {PATH}", f"+++ {PATH}", *changed]
    (line,) = shown(host, WriteFile(PATH, b"secret\n", 0o600))
    assert "secret" not in line
    assert "0600" in line


def test_what_may_not_be_read_is_unknown(host: Host) -> None:
    host.file(PATH, "one\n")
    host.failing[PATH] = PermissionError(errno.EACCES, os.strerror(errno.EACCES), PATH)
    assert shown(host, WriteFile(PATH, b"two\n")) == [f"# cannot show the difference: {PATH}: Permission denied"]


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
