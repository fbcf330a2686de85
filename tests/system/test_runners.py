"""Both halves' runners: what programs get, what is kept of their output, and how they end."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.model.errors import CommandError, UnreadError
from agent.system.process import ENVIRONMENT, OUTPUT_LIMIT, Runner, TimeLimitError, host_runner, run_checked
from agent.system.tool_runner import tool_runner
from tests.fakes.umask import umask

Shell = Callable[..., tuple[int, bytes, bytes]]


RUNNERS: dict[str, Runner] = {"host_runner": host_runner, "tool_runner": tool_runner}


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Runner:
    return RUNNERS[request.param]


@pytest.fixture
def shell(runner: Runner) -> Shell:
    def run(script: str, timeout: float = 20) -> tuple[int, bytes, bytes]:
        completed = runner(("sh", "-c", script), timeout)
        return completed.status, completed.stdout, completed.stderr

    return run


def test_output_and_status(shell: Shell) -> None:
    assert shell("echo out; echo err >&2; exit 3") == (3, b"out\n", b"err\n")
    assert shell("kill -TERM $$")[0] == -signal.SIGTERM
    status, stdout, stderr = shell("head -c 3000000 /dev/zero; head -c 200000 /dev/zero >&2")
    assert (status, len(stdout), len(stderr)) == (0, 3_000_000, 200_000), "more than a pipe holds"


def test_endless_output_is_cut_just_above_the_limit(runner: Runner) -> None:
    completed = runner(("head", "-c", str(OUTPUT_LIMIT * 2), "/dev/zero"), 60)
    assert len(completed.stdout) == OUTPUT_LIMIT + 1
    with pytest.raises(CommandError, match=f"more than {OUTPUT_LIMIT}"):
        run_checked(lambda *_: completed, ("sh",), 60)


def test_a_host_command_that_prints_a_gibibyte_is_killed_earlier() -> None:
    """Output goes to memory, of which the service may use half a gibibyte."""
    killed = r"head -c 1073741824 /dev/zero: killed, because its output, .* exceeds 67108864 bytes"
    with pytest.raises(CommandError, match=killed):
        run_checked(host_runner, ("head", "-c", str(1 << 30), "/dev/zero"), 60)


def test_a_program_that_the_kernel_killed_may_have_had_too_little_memory(runner: Runner) -> None:
    with pytest.raises(CommandError, match=r"killed by signal 9 \(probably .*MemoryMax=.*`journalctl -k --grep=oom`"):
        run_checked(runner, ("sh", "-c", "kill -KILL $$"), 20)


def test_a_program_whose_output_nobody_reads_is_no_cause(runner: Runner) -> None:
    """Of two programs that share a pipe, the other one has failed."""
    with pytest.raises(UnreadError, match=r"killed, because nobody read what it wrote: why$"):
        run_checked(runner, ("sh", "-c", "echo why >&2; kill -PIPE $$"), 20)


def test_the_environment_of_a_program(runner: Runner, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A null input, our environment and not the caller's, the default of SIGPIPE, and none of our descriptors."""
    monkeypatch.setenv("LD_PRELOAD", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert runner(("env",), 20).stdout.decode().splitlines() == [f"{k}={v}" for k, v in ENVIRONMENT.items()]
    assert shell("cat") == (0, b"", b"")
    with open("/dev/null") as ours:
        os.set_inheritable(ours.fileno(), True)
        assert str(ours.fileno()).encode() not in shell("ls /proc/$$/fd")[1].split()
    ignored = int(shell("grep SigIgn /proc/self/status")[1].split()[1], 16)
    assert ignored & (1 << signal.SIGPIPE - 1) == 0


def test_a_tool_writes_large_files_and_uses_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image's layer is larger than what other programs may write."""
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.com:3128")
    monkeypatch.setenv("LD_PRELOAD", "/nonexistent")
    place = tmp_path / "layer"
    script = f"truncate -s 65M {place} && printf x >>{place} && env | grep -v -e PWD= -e SHLVL= -e _="
    completed = tool_runner(("sh", "-c", script), 20)
    assert completed.status == 0, completed.stderr
    assert set(completed.stdout.decode().splitlines()) == {
        "HTTPS_PROXY=http://proxy.example.com:3128",
        *(f"{key}={value}" for key, value in ENVIRONMENT.items()),
    }
    assert place.stat().st_size == (65 << 20) + 1
    # The limit is set right after the start.
    assert host_runner(("sh", "-c", f"sleep 0.2; printf y >>{place}"), 20).status != 0


def test_a_tool_that_unpacks_makes_directories_that_other_users_can_enter() -> None:
    """Even if root's umask is 077: umoci makes the root of a root file system with mode 0755, minus the umask."""
    with umask(0o077):
        assert tool_runner(("sh", "-c", "umask"), 20).stdout == b"0022\n"


DIRECT = "pass"
# A signal comes while the main thread starts another one: its signals are blocked then, and another thread gets it.
WORKER = "from agent.system.deadlines import bounded; bounded('nothing', int, 5)"
BLOCKED = f"{WORKER}; signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})"
# On a busy host, the program may already run for a while when the agent gets its number.
SLOW = "import subprocess, time; P = subprocess.Popen"
SLOW += "; subprocess.Popen = lambda *a, **k: (P(*a, **k), time.sleep(0.5))[0]"


@pytest.mark.parametrize(
    ("name", "number", "before"),
    [
        ("tool_runner", signal.SIGKILL, DIRECT),
        ("tool_runner", signal.SIGINT, DIRECT),
        ("host_runner", signal.SIGINT, DIRECT),
        ("tool_runner", signal.SIGINT, BLOCKED),
        ("host_runner", signal.SIGINT, SLOW),
    ],
    ids=["a tool, killed", "a tool", "a host's program", "another thread got the signal", "it has only just started"],
)
def test_a_program_ends_with_the_agent(tmp_path: Path, name: str, number: int, before: str) -> None:
    """If a tool lived on, it would write files while the next attempt removes them; kubectl would go on evicting.

    The agent runs the statements `before`, and then a program, of a minute.
    """
    pid_file = tmp_path / "pid"
    script = f"echo $$ >{pid_file}; exec sleep 60"
    # A job in the background has ignored SIGINT since its start.
    default = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    module = "process" if name == "host_runner" else name
    code = f"{default}; {before}; from agent.system.{module} import {name}; {name}(('sh', '-c', '{script}'), 60)"
    agent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        while not pid_file.exists() or not pid_file.read_text():
            assert agent.poll() is None
            time.sleep(0.01)
        ended = os.pidfd_open(int(pid_file.read_text()))
    finally:
        agent.send_signal(number)
        agent.wait(20)
    assert select.select([ended], [], [], 20)[0]
    os.close(ended)


def test_what_is_no_program(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = os.listdir("/proc/self/fd")
    unusable = FileNotFoundError if runner is tool_runner else PermissionError
    for program in ("nonexistent-program", "/nonexistent/program", str(tmp_path / "file")):
        with pytest.raises(unusable if program.startswith(str(tmp_path)) else FileNotFoundError):
            runner((program,), 1)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("content", [b"", b"true\n", b"#!/nonexistent\n", b"\x7fELF\x02\x01\x01"])
def test_what_the_kernel_does_not_run_is_neither_called_missing_nor_run_by_a_shell(
    runner: Runner, content: bytes, tmp_path: Path
) -> None:
    """A crash may leave an empty program, and nobody should look for the package of a script that is there."""
    program = tmp_path / "program"
    program.write_bytes(content)
    program.chmod(0o755)
    with pytest.raises(CommandError, match=f"^{program}: cannot be started: "):
        run_checked(runner, (str(program),), 20)


def test_the_time_limit_kills_everything_that_was_started(shell: Shell, tmp_path: Path) -> None:
    """The program's whole session is killed, and all descriptors are closed."""
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


AT_A_TERMINAL = """
from agent.system.{} import {} as runner
open("/dev/tty").close()
print("opened it:", runner(("sh", "-c", ": > /dev/tty"), 20).status == 0)
"""


@pytest.mark.parametrize("names", [("process", "host_runner"), ("tool_runner", "tool_runner")])
def test_a_program_has_no_terminal_of_ours(names: tuple[str, str]) -> None:
    """On a terminal that root's shell has too, it could type commands into that shell (TIOCSTI)."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, (sys.executable, "-c", AT_A_TERMINAL.format(*names)))
    output = b""
    # EIO: the child has closed its side.
    with contextlib.suppress(OSError):
        while output.count(b"\n") < 1:
            output += os.read(terminal, 1000)
    os.waitpid(child, 0)
    os.close(terminal)
    assert output.decode().strip() == "opened it: False"
