"""The command line: help texts, exit codes, and commands on a host without what machines need."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import __version__
from agent.cli.main import main
from agent.cli.parser import COMMANDS, make_parser, subcommands
from agent.config.settings import Config
from agent.host.daemon.health import status_line
from agent.host.reconcile import Reconciler
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host
from tests.fakes.libcuda import answer_of_libcuda

TEMPLATE = "/usr/lib/systemd/system/systemd-nspawn@.service"
INSTALL = "install the package systemd-container"


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


PARSERS = list(parsers(make_parser()))


def help_of(capsys: Capture, *command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


# ---- parsers


@pytest.mark.parametrize("name", subcommands(""))
def test_the_parser_of_one_command_is_the_same_as_in_the_whole(name: str) -> None:
    whole, (alone, *commands) = make_parser(), parsers(make_parser(name))
    assert alone.format_usage() == whole.format_usage()
    names = {each.prog for each in commands}
    assert [each.format_help() for each in commands] == [
        each.format_help() for each in parsers(whole) if each.prog in names
    ]


@pytest.mark.parametrize(
    "command", [("doctor",), ("start", MACHINE), ("stop", MACHINE), ("restart", MACHINE), ("kube", "allocation", "dra")]
)
def test_a_relative_kubeconfig_is_that_of_the_callers_directory(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs run in the root directory."""
    monkeypatch.chdir(tmp_path)
    parse = make_parser().parse_args
    assert parse([*command, "--kubeconfig", "admin.conf"]).kubeconfig == f"{tmp_path}/admin.conf"
    assert parse([*command, "--kubeconfig="]).kubeconfig == parse(command).kubeconfig == ""


# ---- signals


@pytest.mark.parametrize(("prefix", "number"), [((), signal.SIGHUP), (("nohup",), signal.SIGTERM)])
def test_a_command_is_interrupted_when_its_terminal_is_gone(
    tmp_path: Path, prefix: tuple[str, ...], number: int
) -> None:
    """The signal's default action would end it before it kills what it has started. nohup's choice stays as it is."""
    (config := tmp_path / "config.toml").write_text("[machines.gpu-node]\n")
    command = (sys.executable, "-m", "agent.cli.main", f"--config={config}", "status", "--watch")
    # The tests themselves may run under nohup.
    argv = ("env", "--default-signal=HUP", *prefix, *command)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as watching:
        try:
            assert watching.stdout
            assert watching.stdout.readline()
            if prefix:
                watching.send_signal(signal.SIGHUP)
                assert watching.stdout.readline()
            watching.send_signal(number)
            assert watching.wait(20) == 130
        finally:
            watching.kill()


def test_a_watch_follows_the_configuration(tmp_path: Path) -> None:
    """It may run for days. It showed machines that had left the configuration, and none that had come."""
    (config := tmp_path / "config.toml").write_text("[machines.gpu-node]\n")
    command = (sys.executable, "-m", "agent.cli.main", f"--config={config}", "status", "--watch=0.5")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as watching:
        limit = threading.Timer(30, watching.kill)
        limit.start()
        try:
            assert watching.stdout
            for text, expected in (
                ("[machines.gpu-node]\n", "gpu-node: "),
                ("[machines.second]\nspeed = 9\n", f"{config}: machines.second.speed: unknown key"),
                ("[machines.second]\n", "second: "),
                ("[machines]\n", "no machine is configured"),
            ):
                (new := tmp_path / "new").write_text(text)
                new.rename(config)
                assert any(line.startswith(expected) for line in watching.stdout)
        finally:
            limit.cancel()
            watching.kill()


# ---- help and version


def test_the_version_is_an_option_and_a_command(capsys: Capture) -> None:
    assert main(["version"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"unbounded-agent {__version__} (Python ")
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, printed)


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_each_help_has_a_description_exit_codes_and_an_example(parser: argparse.ArgumentParser) -> None:
    assert [line for line in parser.format_help().splitlines() if len(line) > 80] == [], "it fits a terminal"
    paragraphs = parser.format_help().split("\n\n")
    assert paragraphs[1] == parser.description
    assert paragraphs[1].endswith(".")
    codes, example = paragraphs[-2:]
    assert codes.startswith("exit codes:\n  0 ")
    reads_configuration = parser.prog not in ("unbounded-agent version", "unbounded-agent kube manifests")
    assert f"\n  2   {'the configuration or ' if reads_configuration else ''}an argument is wrong" in codes
    assert example.startswith(("example:\n  ", "examples:\n  "))
    assert "unbounded-agent" in example


def test_the_journal_records_commands_that_change_the_host() -> None:
    lifecycle, detaching = (
        {"start", "stop", "restart", "switch"},
        {"gpus detach", "gpus attach", "gpus reset", "gpus test"},
    )
    expected = {"apply", "up", "reset", *lifecycle, *detaching, "gpus forget", "kube allocation", "driver upgrade"}
    assert {name for name, command in COMMANDS.items() if command.changes} == expected


def test_the_help_of_the_program(capsys: Capture) -> None:
    listed = help_of(capsys)
    assert "/usr/share/doc/unbounded-agent/docs/" in listed, "only a checkout has docs/json.md"
    codes = {code for command in COMMANDS.values() for code in command.codes}
    assert [code for code in codes if f"\n  {code:<3} " not in listed] == []
    assert "/etc/unbounded-agent/config.toml.sample" in listed
    hidden = {name for name, command in COMMANDS.items() if command.hidden}
    assert hidden == {"finish-switches", "load-modules", "prepare", "recover-gpus", "run-checks"}
    assert [name for name in hidden if name in listed] == []
    assert [name for name in subcommands("") if name not in listed and name not in hidden] == []
    assert [name for name in subcommands("gpus") if name not in help_of(capsys, "gpus")] == []
    assert "unbounded-agent-prepare@MACHINE.service" in help_of(capsys, "prepare")
    assert "unbounded-agent-modules.service" in help_of(capsys, "load-modules")
    units = {
        "finish-switches": "unbounded-agent-switch",
        "load-modules": "unbounded-agent-modules",
        "recover-gpus": "unbounded-agent-gpus",
    }
    for name, unit in ({"run": "unbounded-agent"} | units).items():
        assert help_of(capsys, name).endswith(f"sudo systemctl start {unit}\n"), "its unit confines it"
    assert "`kube allocation` needs root" in " ".join(help_of(capsys, "kube").split())


# ---- exit codes


@pytest.mark.parametrize(
    ("arguments", "usage", "error"),
    [
        ("statu", "unbounded-agent", "there is no command 'statu'; did you mean 'status' or 'start'?"),
        ("gpus detac", "unbounded-agent gpus", "there is no command 'detac'; did you mean 'detach'?"),
        ("kube all", "unbounded-agent kube", "there is no command 'all'; commands: manifests, allocation"),
        ("status --jsn", "unbounded-agent status", "there is no option '--jsn'; did you mean '--json'?"),
        ("status --jsn=3", "unbounded-agent status", "there is no option '--jsn'; did you mean '--json'?"),
        ("plan gpu-node", "unbounded-agent plan", "'gpu-node' is one argument too many"),
        ("gpus list 0 -x", "unbounded-agent gpus list", "'0' is one argument too many"),
        ("apply --check", "unbounded-agent apply", "there is no option '--check'; options: -h, --help"),
        ("--json status", "unbounded-agent", "there is no option '--json'; the options of a command follow its name"),
        (
            "status --wait gpu-node",
            "unbounded-agent status",
            "argument --wait: 'gpu-node' is not a number of seconds (0 or more): write --wait=SECONDS, or put "
            "--wait last",
        ),
        *((each, "unbounded-agent", "") for each in ("", "gpus -x", "gpus detach", "prepare", "reset", "status -x")),
        *((f"status --{each}", "unbounded-agent", "") for each in ("watch=0", "wait=soon", "wait=nan", "wide --json")),
        ("plan --diff --json", "unbounded-agent plan", ""),
    ],
)
def test_a_wrong_argument_gets_the_usage_of_its_command(
    capsys: Capture, arguments: str, usage: str, error: str
) -> None:
    """The errors named commands that only units run, and the usage was that of the whole program."""
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"usage: {usage}{' [-h]' if error else ''}")
    assert not error or printed.splitlines()[-1] == f"{usage}: error: {error}"


@pytest.mark.parametrize("command", ["plan", "status", "doctor", "gpus"])
def test_a_wrong_configuration_names_the_file(tmp_path: Path, capsys: Capture, command: str) -> None:
    """Which may also be named after the command."""
    file = tmp_path / "config.toml"
    for words in (["--config", str(file), command], [command, "--config", str(file)]):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith(f"unbounded-agent: {file}: no such file")
    file.write_text("machines.a.speed = 9\n")
    assert main(["--config", str(file), command]) == 2
    assert capsys.readouterr().err == f"unbounded-agent: {file}: machines.a.speed: unknown key\n"
    file.write_text("machines.a.speed = 9\nmachines.a.size = 9\n")
    assert main(["--config", str(file), command]) == 2
    assert capsys.readouterr().err == (
        f"unbounded-agent: {file}: machines.a.speed: unknown key\n  {file}: machines.a.size: unknown key\n"
    )


# ---- a host without machines, and one without systemd-container


@pytest.mark.parametrize("name", ["plan", "apply", "status", "doctor"])
def test_each_command_says_that_no_machine_is_configured(gpu_host: Host, capsys: Capture, name: str) -> None:
    """The simulated host lacks the kubelet's sysctls, but no machine has a kubelet: `doctor` finds no fault."""
    assert not reconciler(gpu_host).reconcile().failures
    answer_of_libcuda(gpu_host)
    empty = Reconciler(Config(machines={}), gpu_host, gpu_host)
    assert command(empty, name) == 0
    assert capsys.readouterr().out.splitlines().count(status_line(())) == 1
    assert status_line(()) == "no machine is configured", "so does the service"
    if name in ("status", "doctor"):
        command(empty, f"{name} --json")
        assert json.loads(capsys.readouterr().out)["machines"] == {}


def test_each_command_says_why_nothing_can_start(gpu_host: Host, capsys: Capture) -> None:
    gpu_host.remove_file(TEMPLATE)
    gpu_host.bus.unit("unbounded-agent.service", "inactive", "not-found")
    answer_of_libcuda(gpu_host)
    agent = reconciler(gpu_host)
    why = "systemd-nspawn@.service is in none of"
    assert command(agent, "doctor") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["host:", "  - no machine can start"]
    assert lines[2].startswith(f"    evidence: {why} /etc/systemd/system")
    assert "    fix:      apt install systemd-container" in lines
    assert any(each.startswith("    evidence: unbounded-agent.service is not installed") for each in lines)
    assert f"{MACHINE}: unknown: ObservationFailed" in lines
    assert any(line.startswith("driver for pods: nvidia") for line in lines)
    assert command(agent, "doctor --json") == 1
    document = json.loads(capsys.readouterr().out)
    assert INSTALL in document["host"][0]["evidence"]
    assert MACHINE in document["machines"]
    assert command(agent, "status --wide") == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"unbounded-agent: note: {why}")
    assert "Ready  Unknown" in printed.out
    assert command(agent, "plan") == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{MACHINE}: left unchanged: {why}")
    assert INSTALL in printed.err


def test_a_pass_leaves_a_machine_with_its_settings_unchanged(gpu_host: Host) -> None:
    agent = reconciler(gpu_host)
    agent.reconcile()
    gpu_host.remove_file(TEMPLATE)
    outcome = agent.run_pass(by_hand=(MACHINE,))
    assert (outcome.actions, outcome.failures) == ((), ())
    assert not [argv for argv in gpu_host.runner.calls if "start" in argv]
    gpu_host.file(TEMPLATE, "[Service]\nDeviceAllow=char-pts rw\n")
    assert not agent.reconcile().actions


def test_a_service_that_cannot_start_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 is Python's for an error that nobody handles, which ends the trial of a release."""
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert main(["run"]) == 75
    assert main(["apply"]) == 1
