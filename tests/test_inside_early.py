"""The head start of the generators: taken when a spec is due, never needed, and loaded with next to nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent.inside.early import start_generators
from agent.inside.run import run
from agent.paths import HANDOFF_NAME, MACHINE_HANDOFF_DIRECTORY, MACHINE_STATE, spec_directory
from agent.system.machine_runner import MachineRunner
from agent.vendors.nvidia.generate_command import generate_command
from tests.machine_root import gpu_machine


class Recorder(MachineRunner):
    """Starts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[str, ...]] = []

    def start(self, argv: tuple[str, ...]) -> None:
        self.started.append(argv)


REQUEST = {"vendor": "nvidia", "gpus": ["0000:01:00.0"], "driver_root": "/run/host-nvidia/0"}
COMMAND = generate_command("/run/host-nvidia/0", spec_directory("nvidia"))


def started(root: Path, handoff: object, note: object = None) -> list[tuple[str, ...]]:
    for path, content in (
        (f"{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}", handoff),
        (f"{MACHINE_STATE}/spec-nvidia.json", note),
    ):
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    recorder = Recorder()
    start_generators(recorder, str(root))
    return recorder.started


def test_a_handoff_that_was_not_published_yet(tmp_path: Path) -> None:
    """Once, until its spec has been published."""
    handoff = {"generation": "b", "requests": [REQUEST]}
    assert started(tmp_path, handoff) == [COMMAND]
    assert (tmp_path / spec_directory("nvidia").lstrip("/")).is_dir()
    assert started(tmp_path, handoff, {"generation": "a"}) == [COMMAND]
    assert started(tmp_path, handoff, {"generation": "b"}) == []


@pytest.mark.parametrize(
    "handoff",
    [
        "",
        "not JSON",
        "[" * 100000,
        [],
        {},
        {"requests": 1},
        {"requests": [1, {}, REQUEST | {"vendor": "other"}, REQUEST | {"gpus": []}, REQUEST | {"driver_root": ""}]},
        {"requests": [REQUEST | {"driver_root": 1}]},
    ],
)
def test_what_is_no_request_starts_nothing(tmp_path: Path, handoff: object) -> None:
    assert started(tmp_path, handoff) == []


def test_no_handoff(tmp_path: Path) -> None:
    start_generators(Recorder(), str(tmp_path))


def test_what_was_started_is_what_a_run_takes() -> None:
    """By the very same arguments, and once: the next call starts the program anew."""
    runner = MachineRunner()
    argv = ("/bin/sh", "-c", "echo $$")
    runner.start(argv)
    first, second = runner(argv, 10).stdout, runner(argv, 10).stdout
    assert first != second
    with pytest.raises(FileNotFoundError):
        runner.start(("/nonexistent",))


def test_the_run_asks_for_the_command_that_was_started(tmp_path: Path) -> None:
    """Else every set-up would generate twice."""
    machine = gpu_machine(tmp_path / "machine")
    run(machine)
    assert COMMAND in machine.calls


def test_it_loads_next_to_nothing() -> None:
    """What it loads is the time that the generator starts later."""
    code = "import sys, agent.inside.early; print(*sys.modules)"
    # -I -S: what .pth files of the environment load at every start is not ours.
    repository = str(Path(__file__).parents[1])
    argv = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({repository!r}); {code}"]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    assert not loaded & {"dataclasses", "inspect", "tomllib", "shutil", "tempfile", "agent.handoff"}
