"""`plan` says what a pass and `up` would do, shows differences of files with --diff, and changes nothing."""

import errno
import json
import os
from pathlib import Path

import pytest

from agent.cli.output import difference
from agent.config.settings import Config
from agent.host.provision.node_files import record_paths
from agent.host.reconcile import Reconciler
from agent.model.goal import ReloadUnits, RemoveFile, WriteFile
from agent.model.paths import AS_FOUND, joined_file, machine_root, nspawn_file, token_file
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host
from tests.fakes.node_host import CA_FILE, TOKEN_FILE, NodeHost, node_host, node_reconciler
from tests.fakes.node_settings import config

PATH = "/etc/example.conf"
MISSPELT = "gpu-nod"


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
    host.failing[PATH] = PermissionError(errno.EACCES, os.strerror(errno.EACCES), PATH)
    assert shown(host, WriteFile(PATH, b"two\n")) == [f"# cannot show the difference: {PATH}: Permission denied"]


def test_the_plan_with_differences_and_for_programs(gpu_host: Host, capsys: Capture) -> None:
    assert command(reconciler(gpu_host), "plan --diff") == 0
    lines = capsys.readouterr().out.splitlines()
    place = lines.index(f"+++ {nspawn_file(MACHINE)}")
    assert lines[place - 2].startswith(f"would write {nspawn_file(MACHINE)}")
    assert "+BindReadOnly=/dev/nvidia0" in lines
    assert "would start machine gpu-node" in lines
    assert command(reconciler(gpu_host), "plan --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["exceptions"], found["problems"]) == (1, [], [])
    assert {each["kind"] for each in found["steps"]} >= {"write", "stage", "start"}


# ---- machines that do not exist


def reconciler_of(host: Host, **machines: object) -> Reconciler:
    host.bus.unit(f"systemd-nspawn@{MISSPELT}.service", "inactive")
    return Reconciler(Config.validated({"machines": machines}), host, host)


def test_a_misspelt_machine_is_bad_input(gpu_host: Host, capsys: Capture) -> None:
    """It said that there is nothing to do, and returned 0. The other machines are planned."""
    assert command(reconciler_of(gpu_host, **{MISSPELT: {}}), "plan") == 2
    printed = capsys.readouterr().out
    assert printed == (
        f"{MISSPELT}: left unchanged: /var/lib/machines/{MISSPELT} does not exist; correct the name, or unpack the "
        f"machine's image into that directory\n"
    )
    assert command(reconciler_of(gpu_host, **{MISSPELT: {}}), "plan --json") == 2
    assert capsys.readouterr().out.startswith("{"), "the role for Ansible accepts it"
    assert command(reconciler_of(gpu_host, **{MISSPELT: {}, MACHINE: {}}), "plan") == 2
    assert f"would write /etc/systemd/nspawn/{MACHINE}.nspawn" in capsys.readouterr().out


def test_a_node_that_up_will_make_and_a_file_in_its_place(gpu_host: Host, capsys: Capture) -> None:
    Path(gpu_host.full_path(machine_root(MACHINE))).rmdir()
    assert command(Reconciler(config(**{MACHINE: {}}), gpu_host, gpu_host), "plan") == 0
    printed = capsys.readouterr().out
    assert f"/var/lib/machines/{MACHINE} does not exist; run `unbounded-agent up {MACHINE}`, which makes it" in printed
    assert "unpack" not in printed
    gpu_host.file(machine_root(MACHINE), "")
    assert command(reconciler(gpu_host), "plan") == 1
    assert "is not a directory" in capsys.readouterr().out


# ---- what `up` would do


AS_IT_IS = ("pulled ", "unpacking ", "waiting", f"{MACHINE}: ")
"""The beginnings of what `up` says in addition to its steps."""


@pytest.fixture
def bare(tmp_path: Path) -> NodeHost:
    return node_host(tmp_path / "host")


def planned(host: NodeHost, capsys: Capture) -> tuple[list[str], list[str]]:
    assert command(node_reconciler(host), "plan --json") == 0
    document = json.loads(capsys.readouterr().out)
    of_up = [each["sentence"] for each in document["upSteps"]]
    assert not {each["sentence"] for each in document["steps"]} & {*of_up}
    return of_up, [each["message"] for each in document["exceptions"] if "`up` would do" in each["message"]]


def done(host: NodeHost, capsys: Capture) -> list[str]:
    assert command(node_reconciler(host), f"up {MACHINE} --json", network=host.network, ask=host.ask) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    said = [each["message"] for each in events if each["event"] == "step"]
    return [each for each in said if not each.startswith(AS_IT_IS)]


def test_plan_says_what_up_then_does(bare: NodeHost, capsys: Capture) -> None:
    assert command(node_reconciler(bare), "plan") == 0
    printed = capsys.readouterr().out
    assert "`up` would record the host as it was found\n" in printed
    assert f"`up` would make {machine_root(MACHINE)} from the complete root file system\n" in printed
    assert f"`up` would write /etc/systemd/nspawn/{MACHINE}.nspawn" in printed
    assert "`up` would enable machines.target\n" in printed
    sentences, unknown = planned(bare, capsys)
    assert unknown == []
    assert not any(bare.exists(each) for each in (*AS_FOUND, machine_root(MACHINE)))
    assert [argv for argv in bare.runner.calls if argv[0] != "/sbin/ldconfig"] == [], "nothing is run, nobody is asked"
    # A registry is not asked, so the image has its tag, and no size.
    (pull,) = (each for each in sentences if each.startswith("pull and unpack "))
    assert pull.endswith("/agent-ubuntu2404-nvidia:latest")
    steps = done(bare, capsys)
    assert [pull if each.startswith("pull and unpack ") else each for each in steps] == sentences
    assert planned(bare, capsys) == ([], [])


@pytest.mark.parametrize("fault", ["ca", "token", "record", "interrupted"])
def test_what_is_unknown_is_said(bare: NodeHost, capsys: Capture, fault: str) -> None:
    match fault:
        case "ca":
            bare.remove(CA_FILE)
        case "token":
            done(bare, capsys)
            bare.write(token_file(MACHINE), b"old")
            bare.remove(joined_file(MACHINE))
            bare.remove(TOKEN_FILE)
        case "record":
            done(bare, capsys)
            for path in record_paths(MACHINE):
                bare.failing[path] = PermissionError(13, "Permission denied", path)
        case _:
            bare.make_directory(f"/var/lib/machines/.{MACHINE}.unbounded-agent-0123456789abcdef")
    _, unknown = planned(bare, capsys)
    assert len(unknown) == 1
