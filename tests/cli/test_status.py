"""`status`: forms, exit codes, waiting and repeating, and what a user may not look at."""

import errno
import io
import json
import os
from collections.abc import Iterator

import pytest

from agent.cli.printing import terminal
from agent.config.settings import Config
from agent.host.reconcile import Reconciler
from agent.model.errors import ConfigError
from agent.model.paths import MACHINE_ROOTS, REMEMBERED_GPUS
from agent.system.files import System
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, UNITS, reconciler, units, without_gpus
from tests.fakes.host import Host
from tests.fakes.sound_host import make_sound

ROOT = f"{MACHINE_ROOTS}/{MACHINE}"


def printed(agent: Reconciler, capsys: Capture, *options: str) -> str:
    assert command(agent, "status", *options) == 0
    return capsys.readouterr().out


def hide(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let /var/lib/machines have mode 0700, and the caller be another user than root."""

    def read_link(path: str) -> str | None:
        if path == ROOT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return System.read_link(host, path)

    monkeypatch.setattr(host, "read_link", read_link)


# ---- forms


def test_the_summary_and_the_document_have_the_cause(gpu_host: Host, capsys: Capture) -> None:
    text = printed(reconciler(gpu_host), capsys)
    assert text.startswith(f"{MACHINE}: not ready, NotStaged, 2 GPUs\n")
    assert "DriverRootStaged: False, NotStaged\n" in text
    assert "MachineNotRunning" not in text, "that follows from MachineRunning"
    assert max(map(len, text.splitlines())) <= 80
    found = json.loads(printed(reconciler(gpu_host), capsys, "--json"))
    assert (found["version"], found["command"], found["problems"]) == (1, "status", [])
    machine = found["machines"][MACHINE]
    assert (machine["ready"], machine["reason"], len(machine["gpus"])) == ("False", "NotStaged", 2)
    assert {each["type"] for each in machine["conditions"]} >= {"DriverLoaded", "Ready"}


def test_times_are_unknown_until_a_pass_has_recorded_them(gpu_host: Host, capsys: Capture) -> None:
    """The change may be days old: a command must not say that it came this second."""
    agent = reconciler(gpu_host)
    assert " for " not in printed(agent, capsys).splitlines()[0]
    assert "DriverLoaded  True     -  " in printed(agent, capsys, "--wide")
    found = json.loads(printed(agent, capsys, "--json"))["machines"][MACHINE]["conditions"]
    assert found[0]["lastTransitionTime"] is None
    units(gpu_host, "active")
    agent.reconcile()
    assert ", for " in printed(agent, capsys).splitlines()[0]
    units(gpu_host, "failed")
    found = json.loads(printed(agent, capsys, "--json"))["machines"][MACHINE]["conditions"]
    dated = {each["type"]: each["lastTransitionTime"] is not None for each in found}
    assert (dated["DriverLoaded"], dated["MachineRunning"]) == (True, False)
    assert "MachineRunning  False    -  " in printed(agent, capsys, "--wide")
    agent.reconcile()
    assert "MachineRunning  False    -  " not in printed(agent, capsys, "--wide")


def test_several_machines_are_a_list_and_one_can_be_chosen(gpu_host: Host, capsys: Capture) -> None:
    agent = Reconciler(Config.validated({"machines": {MACHINE: {}, "gone": {}}}), gpu_host, gpu_host)
    gpu_host.bus.unit("systemd-nspawn@gone.service", "inactive")
    text = printed(agent, capsys)
    assert "unbounded-agent status MACHINE" in text
    assert [line for line in text.splitlines() if len(line) > 80] == []
    text = printed(agent, capsys, "gone")
    assert text.startswith("gone: not ready, NoSuchMachine")
    assert f"{MACHINE}: " not in text
    with pytest.raises(ConfigError, match="machine nobody is not configured"):
        command(agent, "status nobody")


# ---- terminals


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return -1


@pytest.mark.parametrize(
    ("variables", "colour"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_only_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], colour: bool) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert terminal() == (80, False)
    monkeypatch.setattr("sys.stdout", Terminal())
    assert terminal() == (80, colour)


# ---- exit codes


def test_check_tells_not_ready_from_unknown(gpu_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = reconciler(gpu_host)
    assert command(agent, "status") == 0
    assert command(agent, "status --check") == 3
    hide(gpu_host, monkeypatch)
    assert command(agent, "status --check") == 4
    monkeypatch.undo()
    without_gpus(gpu_host)
    assert command(reconciler(gpu_host), "status --check") == 3, "all GPUs may be dead"
    assert command(reconciler(gpu_host, require_gpus=False), "status --check") == 0


def test_wait_ends_when_the_machine_is_ready(gpu_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = reconciler(gpu_host, require_gpus=False)
    said: list[str] = []
    agent.progress = said.append
    assert (command(agent, "status --wait=0"), "".join(said)) == (3, "")
    monkeypatch.setattr("time.sleep", lambda _: without_gpus(gpu_host))
    assert command(agent, "status --wait=60") == 0
    assert [each for each in said if each] == [f"{MACHINE}: waiting: NotStaged"]


# ---- repeated


class EndError(Exception):
    pass


def repeat(monkeypatch: pytest.MonkeyPatch, *steps: object) -> None:
    remaining: Iterator[object] = iter(steps)

    def sleep(_: float) -> None:
        step = next(remaining, None)
        if step is None:
            raise EndError
        assert callable(step)
        step()

    monkeypatch.setattr("time.sleep", sleep)


def test_watch_prints_what_changes_and_clears_a_terminal(
    gpu_host: Host, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeat(monkeypatch, lambda: None, lambda: units(gpu_host, "failed"))
    with pytest.raises(EndError):
        command(reconciler(gpu_host), "status --watch=1")
    text = capsys.readouterr().out
    assert text.count(f"{MACHINE}: not ready") == 2, "nothing changed before the second time"
    assert "\x1b" not in text
    repeat(monkeypatch, lambda: None)
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    with pytest.raises(EndError):
        command(reconciler(gpu_host), "status --watch=1")
    assert terminal.getvalue().count("\x1b[H\x1b[2J") == 2


# ---- hosts without GPUs


@pytest.mark.parametrize("settings", [{}, {"extra_devices": [{"path": "/dev/harmless"}]}], ids=["skipped", "set up"])
def test_a_machine_without_gpus_that_does_not_run_is_called_so(
    gpu_host: Host, capsys: Capture, settings: dict[str, object]
) -> None:
    """It counts as ready. `status` gave no sign that it was stopped or masked."""
    agent = reconciler(without_gpus(gpu_host), require_gpus=False, **settings)
    for state, load, said in (
        ("active", "loaded", ""),
        ("activating", "loaded", f"machine {MACHINE} is starting"),
        ("inactive", "masked", f"machine {MACHINE} does not run: see `systemctl status {UNITS[0]}`"),
        ("failed", "loaded", f"machine {MACHINE} does not run: see `systemctl status {UNITS[0]}`"),
    ):
        gpu_host.bus.unit(UNITS[0], state, load)
        ready = json.loads(printed(agent, capsys, "--json"))["machines"][MACHINE]
        assert (ready["ready"], ready["reason"]) == ("True", "NoGPU")
        assert ready["message"] == "this host has no GPU: no GPU is set up" + (f"; {said}" if said else "")
        assert said in " ".join(printed(agent, capsys).split())


# ---- what no condition shows


def test_a_service_that_is_stopped_and_a_full_disk_are_named(
    gpu_host: Host, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The machines work on, and nothing follows changes: `status` said ready without a word."""
    make_sound(gpu_host)
    assert command(reconciler(gpu_host), "status") == 0
    assert capsys.readouterr().err == ""
    gpu_host.bus.unit("unbounded-agent.service", "inactive")
    monkeypatch.setattr(gpu_host, "free_bytes", lambda path: 3 << 20 if path == "/var/lib/unbounded-agent" else 1 << 40)
    for form in ("", " --json"):
        assert command(reconciler(gpu_host), f"status{form}") == 0
        stopped, full = capsys.readouterr().err.splitlines()
        assert stopped.startswith("unbounded-agent: note: nothing follows changes on the host")
        assert "unbounded-agent.service is inactive" in stopped
        why = "the file system of /var/lib/unbounded-agent is nearly full: 3 MiB are free, 512 MiB are needed"
        assert full == f"unbounded-agent: note: {why}: see `unbounded-agent doctor`"


# ---- what a user may not look at


def test_a_machine_that_may_not_be_looked_at_is_unknown(
    gpu_host: Host, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Root reads that it does not exist. A user read that it is ready, with exit code 0, where root got 3."""
    os.rmdir(f"{gpu_host.root}{ROOT}")
    agent = reconciler(without_gpus(gpu_host), require_gpus=False)
    assert printed(agent, capsys).startswith(f"{MACHINE}: not ready, NoSuchMachine")
    units(gpu_host, "inactive", stopped_at=5)
    assert command(agent, "status --check") == 3
    hide(gpu_host, monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    capsys.readouterr()
    assert command(reconciler(gpu_host, require_gpus=False), "status --check") == 4
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{MACHINE}: unknown, ObservationFailed")
    assert "Permission denied" in shown.out
    assert "run `sudo unbounded-agent status`" in shown.err


def test_a_record_of_gpus_that_may_not_be_read(gpu_host: Host, capsys: Capture) -> None:
    """The host may have lost all its GPUs."""
    agent = reconciler(gpu_host, require_gpus=False)
    agent.reconcile()
    without_gpus(gpu_host)
    assert command(agent, "status --check") == 3
    for copy in REMEMBERED_GPUS:
        gpu_host.failing[copy] = PermissionError(errno.EACCES, "Permission denied")
    capsys.readouterr()
    assert command(agent, "status --check") == 4
    assert "granted-gpus.json: Permission denied" in capsys.readouterr().out


def test_a_machine_that_runs_exists(gpu_host: Host, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    hide(gpu_host, monkeypatch)
    assert command(reconciler(gpu_host), "plan") == 0
    text = capsys.readouterr().out
    assert f"{MACHINE}: whether it exists is unknown" in text
    assert f"would start machine {MACHINE}" in text
    units(gpu_host, "active")
    assert "MachineRunning  True" in printed(reconciler(gpu_host), capsys, "--wide")
    units(gpu_host, "inactive", stopped_at=5)
    assert "MachineRunning  False    -      Stopped" in printed(reconciler(gpu_host), capsys, "--wide")


def test_an_administrators_checks_are_conditions_of_the_host(gpu_host: Host, capsys: Capture) -> None:
    """No machine's Ready needs them: a check of unknown quality must not take a node from its pods."""
    before = json.loads(printed(reconciler(gpu_host), capsys, "--json"))
    assert before["checks"] == []
    gpu_host.file("/etc/unbounded-agent/checks.d/DiskHealthy", "", executable=True)
    text = printed(reconciler(gpu_host), capsys)
    assert "\nhost check DiskHealthy: Unknown, CheckNotRun: /run/unbounded-agent/checks.json" in text
    found = json.loads(printed(reconciler(gpu_host), capsys, "--json"))
    (check,) = found["checks"]
    assert [*check] == [*found["machines"][MACHINE]["conditions"][0]]
    assert (check["type"], check["status"], check["reason"]) == ("DiskHealthy", "Unknown", "CheckNotRun")
    assert check["lastTransitionTime"] is None
    assert found["machines"] == before["machines"]
    gpu_host.file("/etc/unbounded-agent/checks.d/disk.sh", "", executable=True)
    assert command(reconciler(gpu_host), "status") == 0
    assert "note: /etc/unbounded-agent/checks.d: these files are not run as checks: disk.sh" in capsys.readouterr().err
