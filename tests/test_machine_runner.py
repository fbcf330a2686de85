"""The machine half's way to run programs: what they get, what is kept of them, and their end."""

import os
import select
import signal
from pathlib import Path

import pytest

from agent.system.commands import ENVIRONMENT, TimeLimitError
from agent.system.machine_runner import MachineRunner


def shell(script: str, timeout: float = 20) -> tuple[int, bytes, bytes]:
    completed = MachineRunner()(("sh", "-c", script), timeout)
    return completed.status, completed.stdout, completed.stderr


def test_output_and_status() -> None:
    assert shell("echo out; echo err >&2; exit 3") == (3, b"out\n", b"err\n")
    assert shell("kill -TERM $$")[0] == -signal.SIGTERM


def test_output_that_no_pipe_holds() -> None:
    status, stdout, stderr = shell("head -c 3000000 /dev/zero; head -c 200000 /dev/zero >&2")
    assert (status, len(stdout), len(stderr)) == (0, 3_000_000, 200_000)


def test_what_a_program_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A null input, our environment and no caller's, the default of SIGPIPE, and none of our descriptors."""
    monkeypatch.setenv("LD_PRELOAD", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert MachineRunner()(("env",), 20).stdout.decode().splitlines() == [f"{k}={v}" for k, v in ENVIRONMENT.items()]
    assert shell("cat") == (0, b"", b"")
    with open("/dev/null") as ours:
        assert str(ours.fileno()).encode() not in shell("ls /proc/$$/fd")[1].split()
    ignored = int(shell("grep SigIgn /proc/self/status")[1].split()[1], 16)
    assert ignored & (1 << signal.SIGPIPE - 1) == 0


@pytest.mark.parametrize("program", ["nonexistent-program", "/nonexistent/program"])
def test_a_program_that_is_not_there(program: str) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        MachineRunner()((program,), 1)
    assert os.listdir("/proc/self/fd") == before


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError):
        MachineRunner()((str(tmp_path / "file"),), 1)


def test_the_time_limit_ends_all_that_was_started(tmp_path: Path) -> None:
    """Its whole session; the descriptors go as well."""
    fifo, before = tmp_path / "fifo", os.listdir("/proc/self/fd")
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(TimeLimitError):
        shell(f"exec 9>{fifo}; echo >&9; sleep 600 & wait", timeout=0.5)
    assert os.read(reader, 10) == b"\n"
    assert select.select([reader], [], [], 10)[0], "somebody still holds the FIFO open"
    assert os.read(reader, 10) == b""
    os.close(reader)
    assert os.listdir("/proc/self/fd") == before
