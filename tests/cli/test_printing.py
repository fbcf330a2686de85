"""Programs that follow a command get each of its lines when it is printed."""

import io
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from agent.cli.node import in_words
from agent.cli.printing import report, say
from agent.model.errors import AgentError
from agent.model.node import Check
from agent.model.paths import machine_root
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE
from tests.fakes.node_host import node_host, node_reconciler


def test_a_line_reaches_a_pipe_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has a buffer for a pipe, as for a file, and does not write it at the end of a line."""
    place = tmp_path / "output"
    with place.open("w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        say(["one", "two"])
        assert place.read_bytes() == b"one\ntwo\n"


def test_attack_a_message_that_a_server_chose_cannot_control_the_terminal(capsys: Capture) -> None:
    report("http://mirror/kubelet: 404 \x1b]0;x\x07\u202e\r\nunbounded-agent: all is well")
    assert capsys.readouterr().err == (
        "unbounded-agent: http://mirror/kubelet: 404 \\x1b]0;x\\x07\\u202e\n  unbounded-agent: all is well\n"
    )


def test_attack_a_check_cannot_control_the_terminal() -> None:
    """It quotes the status line of a server, or of somebody between."""
    check = Check("programs", "http://mirror/kubelet: 404 \x1b]0;x\x07", "check the network")
    assert in_words(check) == r" FAILED  programs: http://mirror/kubelet: 404 \x1b]0;x\x07 (check the network)"


@pytest.mark.processes
@pytest.mark.parametrize("command", ["version", "kube manifests"])
@pytest.mark.parametrize(("output", "code"), [(">/dev/full", 1), (">&-", 0)])
def test_output_that_cannot_be_written_needs_no_traceback(command: str, output: str, code: int) -> None:
    program = f"exec {sys.executable} -m agent.cli.main {command} {output}"
    ended = subprocess.run(("sh", "-c", program), stderr=subprocess.PIPE, text=True, check=False)
    said = "unbounded-agent: standard output: No space left on device\n" if code else ""
    assert (ended.returncode, ended.stderr) == (code, said)


@pytest.mark.processes
def test_errors_do_not_get_into_the_output(tmp_path: Path) -> None:
    """Without a standard error, as in some cron jobs, they did: print() then writes to standard output."""
    program = f"exec {sys.executable} -m agent.cli.main status --json --config {tmp_path}/missing 2>&-"
    ended = subprocess.run(("sh", "-c", program), stdout=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "option", "removed"),
    [
        *((answer, "", True) for answer in ("y\n", " YES\n")),
        *((answer, "", False) for answer in ("\n", "no\n", "")),
        ("", " --yes", True),
    ],
)
@pytest.mark.usefixtures("clock")
def test_a_person_is_asked_before_a_machine_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, option: str, removed: bool
) -> None:
    """As `kubeadm reset` does. A script has no terminal, and is not asked."""
    host, shown = node_host(tmp_path / "host"), Terminal()
    assert command(node_reconciler(host), f"up {MACHINE}", network=host.network, ask=host.ask) == 0
    host.runner.calls.clear()
    monkeypatch.setattr(sys, "stderr", shown)
    for line, services in ((f"up --rebuild {MACHINE}", {"ask": host.ask}), (f"reset {MACHINE}", {})):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        with nullcontext() if removed else pytest.raises(AgentError, match=r"nothing was changed \(answer y, or"):
            assert command(node_reconciler(host), line + option, network=host.network, **services) == 0
        assert host.exists(machine_root(MACHINE)) is not (removed and line.startswith("reset"))
    assert bool(host.runner.calls) is removed
    assert (f"everything in machine {MACHINE} is removed. Continue? [y/N] " in shown.getvalue()) is not bool(option)
