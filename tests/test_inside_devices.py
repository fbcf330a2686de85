"""Device nodes in the machine that are not granted any more."""

from dataclasses import replace
from pathlib import Path

import pytest

from agent.inside.run import run
from agent.system.commands import Completed
from tests.machine_root import DEVICES, GPUS, REQUEST, Machine, gpu_machine

LESS = replace(REQUEST, gpus=GPUS[:1], devices=tuple(each for each in DEVICES if each.path != "/dev/nvidia1"))
UMOUNT = ("umount", "--lazy", "/dev/nvidia1")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = gpu_machine(tmp_path)
    machine.mounts = [device.path for device in DEVICES]
    run(machine)
    machine.calls.clear()
    return machine


def test_a_node_that_is_not_granted_any_more_is_removed(machine: Machine) -> None:
    machine.hand(LESS)
    run(machine)
    assert UMOUNT in machine.calls
    assert not machine.exists("/dev/nvidia1")
    assert machine.exists("/dev/nvidia0")
    assert machine.conditions()["DevicesAllowed"] == ("True", "Opened")


def test_a_node_that_was_bound_twice_is_removed_too(machine: Machine) -> None:
    """systemd before 255 mounts upon what is there."""
    machine.mounts.append("/dev/nvidia1")
    machine.hand(LESS)
    run(machine)
    assert machine.calls.count(UMOUNT) == 2
    assert not machine.exists("/dev/nvidia1")


def test_what_somebody_else_put_there_stays(machine: Machine) -> None:
    machine.hand(LESS)
    machine.drop("/dev/nvidia1")
    machine.mounts.remove("/dev/nvidia1")
    del machine.nodes["/dev/nvidia1"]
    machine.put("/dev/nvidia1", "a file of somebody's own")
    run(machine)
    assert machine.read("/dev/nvidia1") == b"a file of somebody's own"


def test_a_failed_removal_is_said_and_tried_again(machine: Machine) -> None:
    machine.hand(LESS)
    working = machine.programs["umount"]
    machine.program("umount", lambda argv: Completed(32, b"", b"umount: permission denied"))
    run(machine)
    assert machine.conditions()["DevicesAllowed"] == ("False", "NotWithdrawn")
    assert "permission denied" in machine.message("DevicesAllowed")
    machine.program("umount", working)
    run(machine)
    assert not machine.exists("/dev/nvidia1")
    assert machine.conditions()["DevicesAllowed"] == ("True", "Opened")
