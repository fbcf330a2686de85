"""A GPU that no specification can have is not asked for each minute, but at once when anything changes."""

import errno
import json
from collections.abc import Callable

import pytest

from agent.machine.run import HANDOFF, run
from agent.model.handoff import DRA, GrantedDevice
from agent.model.paths import ALLOCATABLE, GPU_STATES_NAME, MACHINE_HANDOFF_DIRECTORY, mode_spec_file, spec_file
from agent.system.process import Completed
from tests.fakes.machine import (
    DEVICES,
    GPUS,
    REQUEST,
    Machine,
    failing,
    hang,
    nvidia_ctk,
    recorded_spec,
    umount,
    without_a_gpu,
)
from tests.fakes.machine import SPEC as RECORDED

MINUTE = 60.0
SPEC = spec_file("nvidia")
MANAGEMENT = RECORDED.parent / "nvidia-ctk-1.19.1-mode-management.json"
GPU_STATES = f"{MACHINE_HANDOFF_DIRECTORY}/{GPU_STATES_NAME}"


def misses(machine: Machine) -> None:
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, without_a_gpu()))


def fails(machine: Machine) -> None:
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, "") if "generate" not in argv else hang(argv))


def asked(machine: Machine) -> int:
    machine.calls.clear()
    run(machine)
    return sum("nvidia-smi" in call[0] or "generate" in call for call in machine.calls)


def of_a_mode(machine: Machine) -> None:
    machine.hand(REQUEST._replace(cdi_modes=("management",)))

    def answer(argv: tuple[str, ...]) -> Completed:
        if "--mode=management" in argv:
            return Completed(1, b"", b"the driver does not answer\n")
        return nvidia_ctk(machine, argv, recorded_spec())

    machine.program("nvidia-ctk", answer)


def stays(machine: Machine) -> None:
    machine.mounts = [device.path for device in DEVICES]
    run(machine)
    devices = tuple(each for each in DEVICES if GPUS[1] != each.pci_address)
    machine.hand(REQUEST._replace(gpus=GPUS[:1], devices=devices))
    machine.program("umount", lambda argv: Completed(32, b"", b"umount: permission denied"))
    fails(machine)


@pytest.mark.parametrize(
    ("fault", "kind", "expected", "words"),
    [
        (misses, "CDISpecCurrent", ("False", "GPUMissing"), ""),
        (fails, "CDISpecCurrent", ("False", "GenerationFailed"), ""),
        (of_a_mode, "CDISpecCurrent", ("True", "Verified"), "management: /usr/bin/nvidia-ctk: exit code 1: the driver"),
        (stays, "DevicesAllowed", ("False", "NotWithdrawn"), "permission denied"),
    ],
    ids=["missing", "hanging", "a mode", "a node that stays"],
)
def test_attempts_become_rare(
    machine: Machine,
    becomes_rare: Callable[..., None],
    fault: Callable[[Machine], None],
    kind: str,
    expected: tuple[str, str],
    words: str,
) -> None:
    fault(machine)
    messages = set()

    def tries() -> int:
        tried = asked(machine)
        assert machine.conditions()[kind] == expected
        messages.add(machine.message(kind))
        return tried

    becomes_rare(tries)
    (message,) = messages
    assert words in message


@pytest.mark.parametrize("fault", [misses, fails], ids=["missing", "hanging"])
@pytest.mark.parametrize(
    "change", ["the handoff", "the same handoff", "the GPU states", "a node", "the tool", "the file"]
)
def test_a_change_ends_the_wait(
    machine: Machine, later: Callable[[float], None], fault: Callable[[Machine], None], change: str
) -> None:
    fault(machine)
    for _ in range(2):
        asked(machine)
        later(MINUTE)
    assert asked(machine)
    assert not asked(machine)
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, recorded_spec()))
    assert not asked(machine), "nothing says that the GPU has recovered"
    match change:
        case "the handoff":
            machine.hand(REQUEST._replace(driver_version="550.163.02"))
            machine.hand(REQUEST)
        case "the same handoff":
            machine.hand(REQUEST)
        case "the GPU states":
            machine.put(GPU_STATES, "published after `gpus attach`")
        case "a node":
            machine.node(DEVICES[0].path, 1, 3)
            run(machine)
            machine.node(DEVICES[0].path, DEVICES[0].major, DEVICES[0].minor)
        case "the tool":
            machine.put("/usr/bin/nvidia-ctk", "another build")
        case _:
            machine.put(SPEC, "{}") if machine.exists(SPEC) else machine.hand(REQUEST)
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    assert GPUS[1] not in machine.message("CDISpecCurrent")
    assert json.loads(machine.read(SPEC))


@pytest.mark.parametrize("mode", ["", "management"])
def test_a_specification_that_cannot_be_written_is_not_made_each_minute(
    machine: Machine, becomes_rare: Callable[..., None], mode: str
) -> None:
    run(machine)
    machine.hand(REQUEST._replace(cdi_modes=(mode,) if mode else (), driver_version="550.163.02"))
    without_a_hook, of_mode = recorded_spec(), json.loads(MANAGEMENT.read_text())
    without_a_hook["containerEdits"]["hooks"].pop()

    def answer(argv: tuple[str, ...]) -> Completed:
        return nvidia_ctk(machine, argv, of_mode if "--mode=management" in argv else without_a_hook)

    machine.program("nvidia-ctk", answer)
    machine.before_write = failing(errno.EROFS, mode_spec_file("nvidia", mode) if mode else SPEC)

    def tries() -> int:
        tried = asked(machine)
        assert "Read-only file system" in machine.message("CDISpecCurrent")
        assert machine.report()["cdi_devices"], "the last good specification serves pods"
        return tried

    becomes_rare(tries)
    machine.before_write = lambda path: None
    machine.put(HANDOFF, machine.read(HANDOFF))
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    assert "Read-only file system" not in machine.message("CDISpecCurrent")


def test_a_defect_of_the_second_attempt_costs_no_device(machine: Machine) -> None:
    """The first one has found what the last good specification serves. Without it, claims would lose their GPUs."""
    channel = GrantedDevice("/dev/nvidia-caps-imex-channels/channel0", "imex-channel", 509, 0)
    machine.node(channel.path, channel.major, channel.minor)
    machine.mounts = [channel.path]
    machine.hand(REQUEST._replace(devices=(*DEVICES, channel)), allocation=DRA)
    run(machine)
    offered = machine.read(ALLOCATABLE)
    assert GPUS[0].encode() in offered
    machine.hand(REQUEST, allocation=DRA)
    fails(machine)

    def unmount(argv: tuple[str, ...]) -> Completed:
        machine.before_read = failing(errno.EIO, "state/spec-failed-nvidia.json")
        return umount(machine, argv)

    machine.program("umount", unmount)
    assert machine.verdict("CDISpecCurrent") == ("False", "Failed")
    assert (
        json.loads(machine.read(ALLOCATABLE))["vendors"][0]["devices"] == json.loads(offered)["vendors"][0]["devices"]
    )
    assert machine.report()["cdi_devices"]
