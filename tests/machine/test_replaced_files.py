"""Each of the agent's own files, replaced by something else, as a pod can that mounts the machine's /run or /var."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.machine.run import REPORT, run
from agent.model.paths import RUNTIME, STATE, spec_file
from tests.fakes.machine import Machine

VICTIM = "/etc/victim"
IN_ETC = (spec_file("nvidia"), "/etc/containerd/conf.d/99-nvidia.toml")


def make_directory(place: Path) -> None:
    """It is not empty, so no rename replaces it and no rmdir removes it."""
    (place / "inner").mkdir(parents=True)


def make_link(place: Path) -> None:
    place.symlink_to(VICTIM)


REPLACEMENTS: dict[str, Callable[[Path], None]] = {
    "directory": make_directory,
    "FIFO": os.mkfifo,
    "link": make_link,
    "dangling link": lambda place: place.symlink_to("/nowhere"),
}


def own_files(machine: Machine) -> list[Path]:
    trees = [machine.tree / directory[1:] for directory in (STATE, RUNTIME)]
    files = [place for tree in trees for place in tree.rglob("*") if place.is_file() and "handoff" not in place.parts]
    return sorted(files)


def settled(machine: Machine) -> dict[str, tuple[str, str]]:
    """Run, and return the conditions, except whether containerd runs: here, nobody restarts it."""
    run(machine)
    return {kind: found for kind, found in machine.conditions().items() if kind != "RuntimeActive"}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_the_machine_half_writes_its_files_again(
    machine: Machine, replacement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, a directory in the place of the report ended all reports."""
    machine.put(VICTIM, "kept")
    run(machine)
    good, files, contents = settled(machine), own_files(machine), [machine.read(path) for path in IN_ETC]
    assert machine.tree / REPORT[1:] in files
    assert len(files) > 8
    for place in (*files, *(machine.tree / path[1:] for path in IN_ETC)):
        place.unlink()
        REPLACEMENTS[replacement](place)
        assert settled(machine) == good, place
    assert machine.read_text(VICTIM) == "kept"
    assert (machine.tree / REPORT[1:]).is_file()
    assert not (machine.tree / REPORT[1:]).is_symlink()
    assert [machine.read(path) for path in IN_ETC] == contents
    logged = capsys.readouterr().err
    assert all(f"{path} is damaged: " in logged for path in IN_ETC)
    kept = [*machine.tree.glob("etc/**/*.damaged-*/inner")]
    assert len(kept) == (len(IN_ETC) if replacement == "directory" else 0), "its content may matter"


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_the_machine_half_generates_a_specification_beside_foreign_things(machine: Machine, replacement: str) -> None:
    """Also in the directories for files that exist for a moment only."""
    good = settled(machine)
    for place in (machine.tree / RUNTIME[1:] / "state").iterdir():
        if place.is_dir():
            REPLACEMENTS[replacement](place / "nvidia.json")
            REPLACEMENTS[replacement](place / "spec.json")
    machine.drop("/etc/cdi/nvidia.yaml")
    machine.put("/var/run/cdi/site.json", '{"kind": "site.com/gpu", "devices": [{"name": "a"}]}')
    assert settled(machine) == good
    assert "site.json" not in machine.message("CDISpecCurrent")
    shutil.rmtree(machine.tree / "run/unbounded-agent/state")
    assert settled(machine) == good
