"""The machine half reports files that differ from what `up` put into the machine."""

import hashlib
import time
from collections.abc import Callable

import pytest

from agent.machine.containerd_tables import MAIN
from agent.machine.kubelet import CHANGED_FILES_NOTE, DELAY
from agent.machine.notes import Notes
from agent.machine.run import run
from agent.model.contract import render_node_files
from agent.model.paths import NODE_FILES
from tests.fakes.machine import REQUEST, Machine

KUBELET, UNIT = "/usr/local/bin/kubelet", "/etc/systemd/system/kubelet.service"
SETTINGS = "/etc/kubernetes/kubelet.json"
FILES = {KUBELET: b"a program", UNIT: b"[Unit]\n", SETTINGS: b"{}\n"}


def publish(machine: Machine, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        machine.put(path, content)
    listed = {path: (hashlib.sha256(each).hexdigest(), len(each)) for path, each in files.items()}
    machine.put(NODE_FILES, render_node_files(listed))


@pytest.fixture
def node(machine: Machine) -> Machine:
    publish(machine, FILES)
    run(machine)
    return machine


def reported(machine: Machine) -> list[str]:
    """Return the changed files that a run reports which is late enough after the boot."""
    notes = Notes(machine)
    noted = notes.load(CHANGED_FILES_NOTE)
    notes.save(CHANGED_FILES_NOTE, {**noted, "first_run": noted.get("first_run", time.monotonic()) - DELAY})
    run(machine)
    found: list[str] = machine.report().get("changed_files", [])
    return found


def replaced_by_directory(machine: Machine) -> None:
    machine.drop(UNIT)
    machine.make_directory(UNIT)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda machine: None, []),
        (lambda machine: machine.put(KUBELET, b"a proGram"), [KUBELET]),
        (lambda machine: machine.put(SETTINGS, b'{"maxPods": 500}\n'), [SETTINGS]),
        (lambda machine: machine.drop(KUBELET), [KUBELET]),
        (replaced_by_directory, [UNIT]),
        (lambda machine: machine.put(NODE_FILES, b"{"), [NODE_FILES]),
        (lambda machine: machine.put(NODE_FILES, b'{"version": 1, "files": {"/etc/x": [1]}}'), [NODE_FILES]),
        (lambda machine: machine.put(NODE_FILES, b'{"version": 1, "files": {"/x\\u0000": ["", 1]}}'), [NODE_FILES]),
        (lambda machine: machine.drop(NODE_FILES), []),
    ],
)
def test_a_change_is_reported_until_it_is_undone(
    node: Machine, change: Callable[[Machine], None], expected: list[str]
) -> None:
    listed = node.read(NODE_FILES)
    assert reported(node) == []
    change(node)
    assert [reported(node), reported(node)] == [expected, expected]
    if node.is_directory(UNIT):
        node.remove_tree(UNIT)
    for path, content in {**FILES, NODE_FILES: listed}.items():
        node.put(path, content)
    assert reported(node) == []


def test_programs_are_read_after_they_were_written_and_not_by_the_first_runs_after_a_boot(node: Machine) -> None:
    """The kubelet waits for the first run, and for the one after the start of containerd."""
    node.put(KUBELET, b"another")
    run(node)
    assert (node.digests, node.report()["changed_files"]) == ([], [])
    assert reported(node) == [KUBELET]
    node.put(KUBELET, FILES[KUBELET])
    reported(node)
    assert set(FILES) <= set(node.digests)
    node.digests.clear()
    reported(node)
    node.put(UNIT, b"[Uni2]\n")
    node.put(KUBELET, b"a program of another size")
    assert [reported(node), reported(node)] == [[UNIT, KUBELET]] * 2
    assert node.digests == [UNIT]


def test_the_agents_own_import_is_no_change(machine: Machine) -> None:
    publish(machine, {MAIN: b"version = 2\n"})
    machine.hand(REQUEST, containerd_drop_in="/etc/containerd/other.d/99-gpu.toml")
    run(machine)
    assert machine.read_text(MAIN) != "version = 2\n"
    assert reported(machine) == []
    machine.hand(REQUEST)
    run(machine)
    assert machine.read_text(MAIN) != "version = 2\n"
    assert reported(machine) == [], "the import stays"
