"""Changes that somebody makes in the machine are repaired, counted and logged; other writes are not counted."""

from collections.abc import Callable

import pytest

from agent.machine.containerd_tables import CRI_2, MAIN
from agent.machine.notes import Notes
from agent.machine.run import run
from agent.model.text import sha256
from tests.fakes.machine import LIBRARIES, REQUEST, VERSION, Machine, settle

DROP_IN = "/etc/containerd/conf.d/99-nvidia.toml"
SPEC = "/etc/cdi/nvidia.yaml"
RUNTIME = "/etc/nvidia-container-runtime/config.toml"
LINK = f"/{LIBRARIES}/libcuda.so.1"
NONE = {"links": 0, "spec": 0, "containerd": 0, "runtime": 0}


@pytest.fixture
def settled(machine: Machine) -> Machine:
    settle(machine)
    return machine


def edit(path: str, old: str, new: str) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        text = machine.read_text(path)
        assert old in text
        machine.put(path, text.replace(old, new))

    return change


def replace_main(machine: Machine) -> None:
    """Act like a configuration tool that does not know of imports."""
    machine.put(MAIN, "version = 2\n")


@pytest.mark.parametrize(
    ("change", "what", "expected"),
    [
        (lambda machine: machine.drop(LINK), "links", f"somebody changed {LINK}"),
        (edit(SPEC, "/dev/nvidia1", "/dev/nvidia0"), "spec", f"somebody changed {SPEC}"),
        (lambda machine: machine.put(SPEC, machine.read(SPEC) + b" "), "spec", f"somebody changed {SPEC}"),
        (lambda machine: machine.put(SPEC, "[" * 100_000), "spec", f"somebody changed {SPEC}"),
        (lambda machine: machine.drop(SPEC), "spec", f"somebody changed {SPEC}"),
        (edit(DROP_IN, "enable_cdi = true", "enable_cdi = false"), "containerd", f"somebody changed {DROP_IN}"),
        (lambda machine: machine.put(DROP_IN, "not toml ="), "containerd", f"somebody changed {DROP_IN}"),
        (lambda machine: machine.drop(DROP_IN), "containerd", f"somebody removed {DROP_IN}"),
        (replace_main, "containerd", f"somebody removed the import of {DROP_IN} from {MAIN}"),
        (edit(RUNTIME, '"cdi"', '"auto"'), "runtime", f"somebody changed {RUNTIME}"),
    ],
)
def test_a_repair_is_counted_and_logged(
    settled: Machine, capsys: pytest.CaptureFixture[str], change: Callable[[Machine], None], what: str, expected: str
) -> None:
    assert settled.report()["repairs"] == NONE
    capsys.readouterr()
    change(settled)
    run(settled)
    assert settled.report()["repairs"] == NONE | {what: 1}
    assert f"<4>repaired: {expected}" in capsys.readouterr().err
    run(settled)
    assert settled.report()["repairs"] == NONE | {what: 1}
    assert {status for status, _ in settled.conditions().values()} <= {"True", "Unknown"}


def test_what_is_not_a_repair(settled: Machine) -> None:
    notes, (_, digest) = Notes(settled), Notes(settled).load("runtime-nvidia")["edited"]
    older = settled.read_text(RUNTIME).replace('"cdi"', '"auto"')
    settled.put(RUNTIME, older)
    notes.save("runtime-nvidia", {"edited": ["settings of an older release", sha256(older.encode())]})
    run(settled)
    assert notes.load("runtime-nvidia")["edited"][1] == digest, "the file has the new settings"
    assert settled.report()["repairs"] == NONE
    # Changes that follow from an edit of containerd's main file, with our import intact, do not count either.
    devices = tuple(device for device in REQUEST.devices if device.path != "/dev/nvidia1")
    files = tuple(file for file in REQUEST.files if not file.target.endswith(f"libnvidia-glcore.so.{VERSION}"))
    settled.hand(REQUEST._replace(devices=devices, gpus=REQUEST.gpus[:1], files=files))
    edit(MAIN, "version = 2", f'version = 2\n[plugins."{CRI_2}"]\nsandbox_image = "theirs"')(settled)
    run(settled)
    assert "theirs" in settled.read_text(DROP_IN)
    assert settled.report()["repairs"] == NONE


def test_a_boot_restarts_the_count(settled: Machine) -> None:
    settled.drop(LINK)
    run(settled)
    settled.remove_tree("/run/unbounded-agent/state")
    settled.drop(LINK)
    run(settled)
    assert settled.report()["repairs"] == NONE
