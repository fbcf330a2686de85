"""`plan` shows what `up` would do, and changes nothing."""

import json
from pathlib import Path

import pytest

from agent.host.provision.node_files import record_paths
from agent.model.paths import AS_FOUND, joined_file, machine_root, token_file
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE
from tests.fakes.node_host import CA_FILE, TOKEN_FILE, NodeHost, node_host, node_reconciler

AS_IT_IS = ("pulled ", "unpacking ", "waiting", f"{MACHINE}: ")
"""The beginnings of what `up` says in addition to its steps."""


@pytest.fixture
def host(tmp_path: Path) -> NodeHost:
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


def test_plan_says_what_up_then_does(host: NodeHost, capsys: Capture) -> None:
    assert command(node_reconciler(host), "plan") == 0
    printed = capsys.readouterr().out
    assert "`up` would record the host as it was found\n" in printed
    assert f"`up` would make {machine_root(MACHINE)} from the complete root file system\n" in printed
    assert f"`up` would write /etc/systemd/nspawn/{MACHINE}.nspawn" in printed
    assert "`up` would enable machines.target\n" in printed
    sentences, unknown = planned(host, capsys)
    assert unknown == []
    assert not any(host.exists(each) for each in (*AS_FOUND, machine_root(MACHINE)))
    assert [argv for argv in host.runner.calls if argv[0] != "/sbin/ldconfig"] == [], "nothing is run, nobody is asked"
    # A registry is not asked, so the image has its tag, and no size.
    (pull,) = (each for each in sentences if each.startswith("pull and unpack "))
    assert pull.endswith("/agent-ubuntu2404-nvidia:latest")
    steps = done(host, capsys)
    assert [pull if each.startswith("pull and unpack ") else each for each in steps] == sentences
    assert planned(host, capsys) == ([], [])


@pytest.mark.parametrize("fault", ["ca", "token", "record", "interrupted"])
def test_what_is_unknown_is_said(host: NodeHost, capsys: Capture, fault: str) -> None:
    match fault:
        case "ca":
            host.remove(CA_FILE)
        case "token":
            done(host, capsys)
            host.write(token_file(MACHINE), b"old")
            host.remove(joined_file(MACHINE))
            host.remove(TOKEN_FILE)
        case "record":
            done(host, capsys)
            for path in record_paths(MACHINE):
                host.failing[path] = PermissionError(13, "Permission denied", path)
        case _:
            host.make_directory(f"/var/lib/machines/.{MACHINE}.unbounded-agent-0123456789abcdef")
    _, unknown = planned(host, capsys)
    assert len(unknown) == 1
