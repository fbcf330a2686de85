"""The head start of generators: used if a specification is due, never needed, and soon."""

import json
import os
import select
import shlex
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.machine.prefetch import EarlyRunner, start_generators
from agent.machine.run import run
from agent.model.paths import HANDOFF_NAME, MACHINE_HANDOFF_DIRECTORY, MACHINE_STATE, spec_directory
from agent.vendors.nvidia.command import generate_command
from tests.fakes.machine import gpu_machine
from tests.fakes.waiting import wait_for


class Recorder(EarlyRunner):
    """Records the programs instead of starting them."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[str, ...]] = []
        self.is_current: Callable[[], bool] = lambda: False

    def start(self, argv: tuple[str, ...], is_current: Callable[[], bool]) -> None:
        self.started.append(argv)
        self.is_current = is_current


REQUEST = {"vendor": "nvidia", "gpus": ["0000:01:00.0"], "driver_root": "/run/host-nvidia/0"}
COMMANDS = [generate_command("/run/host-nvidia/0", spec_directory("nvidia"))]


def started(root: Path, handoff: object) -> list[tuple[str, ...]]:
    file = root / f"{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}".lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(handoff if isinstance(handoff, str) else json.dumps(handoff))
    return recorded(root).started


def recorded(root: Path) -> Recorder:
    recorder = Recorder()
    start_generators(recorder, str(root))
    return recorder


def handoff(generation: str = "a", version: object = 1) -> dict[str, object]:
    return {"version": version, "generation": generation, "requests": [REQUEST]}


def test_each_generation_has_one_head_start(tmp_path: Path) -> None:
    """The run handles the result; if a foreign file blocks the output, a head start each minute would be wasted."""
    assert started(tmp_path, handoff("a")) == COMMANDS
    assert (tmp_path / spec_directory("nvidia").lstrip("/")).is_dir()
    assert started(tmp_path, handoff("a")) == []
    assert started(tmp_path, handoff("b")) == COMMANDS
    assert started(tmp_path, handoff("a")) == COMMANDS


def test_the_command_has_the_hooks(tmp_path: Path) -> None:
    """Without the hooks, the run would need another command, and the result of the first one would be wasted."""
    hooks = ["enable-cuda-compat"]
    document = handoff() | {"requests": [REQUEST | {"cdi_hooks": hooks}]}
    assert started(tmp_path, document) == [generate_command("/run/host-nvidia/0", spec_directory("nvidia"), hooks)]


def test_a_start_that_cannot_be_noted_is_not_made(tmp_path: Path) -> None:
    """A full /run must not start a generator each minute."""
    (tmp_path / MACHINE_STATE[1:]).parent.mkdir(parents=True)
    (tmp_path / MACHINE_STATE[1:]).touch()
    assert started(tmp_path, handoff()) == []


@pytest.mark.parametrize("version", [0, 3, 1.0, "1", None, [1]])
def test_a_version_that_the_run_refuses(tmp_path: Path, version: object) -> None:
    assert started(tmp_path, handoff(version=version)) == []


@pytest.mark.parametrize(
    "document",
    [
        "",
        "not JSON",
        "[" * 100000,
        [],
        {},
        {"version": 1, "requests": [REQUEST]},
        {"version": 1, "generation": "a"},
        {"version": 1, "generation": "\ud800", "requests": [REQUEST]},
        *(
            {"version": 1, "generation": "a", "requests": requests}
            for requests in (
                1,
                [1, {}, REQUEST | {"vendor": "other"}, REQUEST | {"gpus": []}, REQUEST | {"driver_root": ""}],
                [REQUEST | {"driver_root": 1}],
            )
        ),
    ],
)
def test_a_document_without_a_request_starts_nothing(tmp_path: Path, document: object) -> None:
    assert started(tmp_path, document) == []


def test_no_handoff(tmp_path: Path) -> None:
    """An error here would end the run before it could report it."""
    assert recorded(tmp_path).started == []
    assert list(tmp_path.iterdir()) == [], "nothing is noted: the handoff's first generation gets its head start"


def test_a_run_takes_the_program_that_was_started() -> None:
    """The same arguments get its output, but only once: the next call starts the program again."""
    runner = EarlyRunner()
    argv = ("/bin/sh", "-c", "echo $$")
    runner.start(argv, lambda: True)
    first, second = runner(argv, 10).stdout, runner(argv, 10).stdout
    assert first != second
    with pytest.raises(FileNotFoundError):
        runner.start(("/nonexistent",), lambda: True)


@pytest.mark.parametrize("arguments", ["same", "other"])
def test_a_program_whose_result_is_outdated_is_killed_before_the_next_one(tmp_path: Path, arguments: str) -> None:
    """Both may write to the same file, also if the new command has other arguments."""
    runner, file = EarlyRunner(), tmp_path / "pid"
    script = f"[ -e {file} ] && (kill -0 $(cat {file}) && echo alive; true) && exit; echo $$ > {file}.new"
    argv = ("/bin/sh", "-c", f"{script}; mv {file}.new {file}; exec sleep 600", "same")
    runner.start(argv, lambda: False)
    wait_for(file.exists)
    assert runner((*argv[:3], arguments), 10).stdout == b""


@pytest.mark.parametrize("content", ["a", "b"])
def test_a_result_is_outdated_once_the_handoff_is_published_again(tmp_path: Path, content: str) -> None:
    """With the same content too: the host has then bound nodes that were missing when the generator started."""
    assert started(tmp_path, handoff()) == COMMANDS
    (tmp_path / f"{MACHINE_STATE}/early".lstrip("/")).unlink()
    recorder = recorded(tmp_path)
    assert recorder.is_current()
    file = tmp_path / f"{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}".lstrip("/")
    new = file.with_name("new")
    new.write_text(json.dumps(handoff(content)))
    new.rename(file)
    assert not recorder.is_current()
    file.unlink()
    assert not recorder.is_current()


def test_threads_never_run_two_programs_for_one_output(tmp_path: Path) -> None:
    """Steps of a run are in threads: the first one ends the outdated program, and the others wait for that."""
    runner, pid = EarlyRunner(), tmp_path / "pid"
    outputs: list[bytes] = []

    def is_current() -> bool:
        time.sleep(0.05)
        return False

    runner.start(("/bin/sh", "-c", f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600"), is_current)
    wait_for(pid.exists)
    process, begin = pid.read_text().strip(), threading.Barrier(8)

    def call() -> None:
        begin.wait()
        argv = ("/bin/sh", "-c", f"kill -0 {process} 2>/dev/null && echo alive; true")
        outputs.append(runner(argv, 10).stdout)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == [b""] * 8


def test_an_unused_program_is_killed_with_its_children(tmp_path: Path) -> None:
    """The program's whole session is killed, as it is at a time limit."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    runner = EarlyRunner()
    runner.start(("/bin/sh", "-c", f"(echo; exec sleep 600) > {fifo} & wait"), lambda: True)
    with fifo.open() as child:
        child.readline()
        runner.close()
        ready, _, _ = select.select([child], [], [], 10)
        assert ready, "the child still holds the FIFO open"
        assert child.read() == ""
    runner.close()


def test_the_run_uses_the_command_that_was_started(tmp_path: Path) -> None:
    """Otherwise every set-up would generate twice."""
    machine = gpu_machine(tmp_path / "machine")
    run(machine)
    assert all(command in machine.calls for command in COMMANDS)


@pytest.mark.processes
def test_the_generators_start_within_four_times_the_time_of_bare_python() -> None:
    """Processor time, the least of several runs: other work on this computer makes single runs longer."""
    repository = Path(__file__).parents[2]
    unit = (repository / "systemd/machine/unbounded-agent-gpu.service").read_text()
    command = shlex.split(next(line for line in unit.splitlines() if line.startswith("ExecStart=")))
    assert command[-1].endswith("; sys.exit(main())")
    code = f"import sys; sys.path.insert(0, {str(repository)!r}); {command[-1].replace('sys.exit(main())', '')}"
    ours, bare = (processor_time(each) for each in ((*command[1:-1], code), ("-I", "-c", "pass")))
    assert ours <= 4 * bare, f"{ours} s, and {bare} s for bare Python"


def processor_time(arguments: tuple[str, ...]) -> float:
    """Return the least processor time of several runs of Python, in seconds."""
    times = []
    for _ in range(7):
        process = os.posix_spawn(sys.executable, (sys.executable, *arguments), {})
        _, status, used = os.wait4(process, 0)
        assert status == 0
        times.append(used.ru_utime + used.ru_stime)
    return min(times)
