"""Programs that follow a command get each of its lines when it is printed."""

import subprocess
import sys
from pathlib import Path

import pytest

from agent.cli.node import in_words
from agent.cli.printing import report, say
from agent.model.node import Check
from tests.fakes.command import Capture


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
