"""Commands that the running service answers: the same output and exit code as from the command's own process."""

import errno
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from agent.cli import garbage
from agent.cli.answering import DECLINED, Answers
from agent.cli.asking import ask_service, installation
from agent.cli.gpu_list import list_gpus
from agent.cli.printing import LISTING, hand_over, report, say
from agent.cli.status import Request, status
from agent.host.daemon.http.local_server import LocalServer
from agent.host.state.gpu_faults import observe_faults
from agent.model.paths import GPU_FAULTS, STATUSZ_SOCKET
from agent.system.files import System
from agent.system.open_files import Held, Holder
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host

Command = Callable[[Sequence[str]], int]
POD = "0b3a2c1d-0000-4000-8000-000000000001"
REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root asks")


@contextmanager
def service(directory: Path, command: Command) -> Iterator[str]:
    server = LocalServer(str(directory), STATUSZ_SOCKET, Answers(lambda: True, command).page)
    try:
        yield str(directory)
    finally:
        server.stop()


def request(*arguments: str, **different: object) -> str:
    content = {"arguments": arguments, "width": 80, "colour": False, "installation": installation()} | different
    return json.dumps(content).encode().hex()


def test_the_answer_is_that_of_the_command(gpu_host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(arguments: Sequence[str]) -> int:
        report("a remark")
        return status(reconciler(gpu_host), Request(check="--check" in arguments))

    own = command(["status", "--check"])
    printed = capsys.readouterr()
    with service(tmp_path, command) as directory:
        assert ask_service(["status", "--check"], directory) == own == 3
    assert capsys.readouterr() == printed
    assert printed.out.startswith(f"{MACHINE}: not ready")
    assert printed.err == "unbounded-agent: a remark\n"


def test_the_askers_terminal_counts(
    gpu_host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with service(tmp_path, lambda arguments: status(reconciler(gpu_host))) as directory:
        ask_service(["status"], directory)
    assert "\x1b[" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["gpus"], ["gpus", "list"], ["gpus", "--json"], ["gpus", "list", "--json"]])
def test_the_askers_own_process_finds_who_uses_gpus(
    gpu_host: Host,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    """The service's sandbox hides the processes of others."""
    searched = []

    def find(system: System, wanted: Mapping[tuple[int, int], str]) -> Held:
        searched.append(system.root)
        return Held((Holder(7, (), "python", f"/kubepods/pod{POD}/x", (min(wanted.values()),)),))

    def command(arguments: Sequence[str]) -> int:
        return list_gpus(reconciler(gpu_host), for_programs="--json" in arguments)

    monkeypatch.setattr("agent.cli.gpu_table.find_holders", find)
    monkeypatch.setattr("time.time", lambda: 1e9)
    assert command(arguments) == 0
    own = capsys.readouterr()
    with service(tmp_path, command) as directory:
        assert ask_service(arguments, directory) == 0
    assert capsys.readouterr() == own
    assert "0000:01:00.0" in own.out
    assert (POD in own.out) == ("--json" in arguments)
    assert searched == [gpu_host.root, "/"]


def test_a_list_whose_users_cannot_be_searched_is_no_answer(
    gpu_host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*_: object) -> Held:
        raise PermissionError(errno.EACCES, "simulated", "/proc")

    monkeypatch.setattr("agent.cli.gpu_table.find_holders", find)
    with service(tmp_path, lambda arguments: list_gpus(reconciler(gpu_host), for_programs=False)) as directory:
        assert ask_service(["gpus"], directory) is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["apply"],
        ["status", "--watch"],
        ["status", "--wait=5"],
        ["--config", "/etc/x.toml", "status"],
        ["plan", "--help"],
        ["gpus", "holders"],
        ["gpus", "detach", "0000:01:00.0"],
        ["gpus", "list", "more"],
        ["doctor"],
    ],
)
def test_what_the_service_is_not_asked(tmp_path: Path, arguments: list[str]) -> None:
    """Long commands would hold the service's slots, and its sandbox hides processes and files in /tmp."""
    asked: list[str] = []
    server = LocalServer(str(tmp_path), STATUSZ_SOCKET, asked.append)
    try:
        assert ask_service(arguments, str(tmp_path)) is None
    finally:
        server.stop()
    assert asked == []
    assert Answers(lambda: True, lambda arguments: 0).page(request(*arguments)) == DECLINED


def test_without_a_service_the_command_runs_itself(tmp_path: Path) -> None:
    assert ask_service(["status"], str(tmp_path)) is None


def test_an_older_service_has_no_such_page(tmp_path: Path) -> None:
    server = LocalServer(str(tmp_path), STATUSZ_SOCKET)
    try:
        assert ask_service(["status"], str(tmp_path)) is None
    finally:
        server.stop()


def test_a_user_who_is_not_root_never_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with service(tmp_path, lambda arguments: 0) as directory:
        assert ask_service(["status"], directory) is None


@pytest.mark.parametrize(
    "query",
    [
        "",
        "zz",
        b"[]".hex(),
        b"{}".hex(),
        request("status", installation=["0.0.9", "/usr/lib/agent/__init__.py", 1]),
        request("status", width="wide"),
        request("run"),
        request("status", arguments=7),
    ],
)
def test_the_service_declines(query: str) -> None:
    def command(arguments: Sequence[str]) -> int:
        raise AssertionError("must not run")

    assert Answers(lambda: True, command).page(query) == DECLINED


def test_a_wrong_argument_is_worded_by_the_commands_own_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert Answers(lambda: True).page(request("status", "one", "two")) == DECLINED
    assert "usage" in capsys.readouterr().err


def test_a_changed_configuration_is_loaded_by_the_commands_own_process() -> None:
    """The service would have to load the validator, and keep it in memory."""

    def command(arguments: Sequence[str]) -> int:
        raise AssertionError("must not run")

    assert Answers(lambda: False, command).page(request("status")) == DECLINED


def test_a_damaged_file_is_named_by_the_commands_own_process(host: Host) -> None:
    """Also one that the service has named in its journal long ago."""

    def command(arguments: Sequence[str]) -> int:
        observe_faults(host)
        return 0

    host.file(GPU_FAULTS, "{")
    for _ in range(2):
        assert Answers(lambda: True, command).page(request("status")) == DECLINED


def test_an_unexpected_error_in_the_service_is_no_answer(tmp_path: Path) -> None:
    def command(arguments: Sequence[str]) -> int:
        raise RuntimeError("simulated")

    with service(tmp_path, command) as directory:
        assert ask_service(["status"], directory) is None


def test_requests_at_once_do_not_mix(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)

    def command(arguments: Sequence[str]) -> int:
        say([arguments[1]])
        barrier.wait(60)
        say([arguments[1]])
        return 0

    answers = Answers(lambda: True, command)
    with ThreadPoolExecutor(2) as pool:
        pages = list(pool.map(answers.page, [request("status", "a"), request("status", "b")]))
    assert [page.status for page in pages] == [HTTPStatus.OK] * 2
    assert [json.loads(page.body)["output"] for page in pages] == [[["stdout", f"{each}\n"]] * 2 for each in "ab"]


def test_the_service_collects_garbage_as_usual() -> None:
    """A command puts it off until it ends; in the service, it would use tens of megabytes."""
    usual = gc.get_threshold()
    try:
        garbage.for_a_command()
        assert gc.get_threshold()[0] > usual[0]
        garbage.for_a_service()
        assert gc.get_threshold() == garbage.DEFAULT_THRESHOLDS
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from agent.cli.asking import ask_service
print("code", ask_service([sys.argv[3]], sys.argv[2]))
print("loaded", *sys.modules)
"""


def asked(directory: str, command: str) -> list[str]:
    argv = (sys.executable, "-I", "-B", "-c", CHILD, str(REPOSITORY), directory, command)
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.processes
def test_asking_loads_next_to_nothing(tmp_path: Path) -> None:
    """Each module takes about 0.3 ms to import. Python itself loads 30 to 60 modules."""

    def command(arguments: Sequence[str]) -> int:
        say(["answer"])
        return 4

    with service(tmp_path, command) as directory:
        answer, code, loaded = asked(directory, "status")
    assert (answer, code) == ("answer", "code 4")
    names = set(loaded.split())
    assert {name for name in names if name.startswith("agent.")} <= {
        *("agent.cli", "agent.cli.asking", "agent.cli.printing", "agent.cli.terminal"),
        *("agent.model", "agent.model.paths"),
    }
    assert names & {"argparse", "dataclasses", "pydantic", "msgspec", "asyncio", "typing", "logging", "http"} == set()
    assert len(names) < 90


@pytest.mark.processes
def test_a_list_of_gpus_loads_only_the_search_for_their_users(tmp_path: Path) -> None:
    def command(arguments: Sequence[str]) -> int:
        assert hand_over(LISTING, json.dumps({"entries": [], "unknown": [], "for_programs": False}))
        return 0

    with service(tmp_path, command) as directory:
        answer, code, loaded = asked(directory, "gpus")
    assert (answer, code) == ("this host has no GPU", "code 0")
    names = set(loaded.split())
    assert (
        names & {"argparse", "dataclasses", "pydantic", "msgspec", "asyncio", "logging", "http", "sh", "jeepney"}
        == set()
    )
    assert {name.split(".")[1] for name in names if name.startswith("agent.")} == {"cli", "model", "system"}
    assert len(names) < 130
