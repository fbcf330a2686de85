"""The machine's links by number in /dev/char, which udev makes on a host."""

import shutil

import pytest

from agent.machine.devices import link_nodes
from agent.machine.notes import Context
from agent.machine.run import run
from tests.fakes.machine import DEVICES, EMPTY, GPUS, REQUEST, Machine

FIRST, SECOND = "/dev/char/195:0", "/dev/char/195:1"
WITHOUT_SECOND = REQUEST._replace(gpus=GPUS[:1], devices=tuple(each for each in DEVICES if each.path != "/dev/nvidia1"))


def test_links_follow_what_is_granted(machine: Machine) -> None:
    run(machine)
    found = {device.path: machine.read_link(f"/dev/char/{device.major}:{device.minor}") for device in DEVICES}
    assert found == {device.path: f"../{device.path.removeprefix('/dev/')}" for device in DEVICES}
    machine.drop(FIRST)
    run(machine)
    assert machine.read_link(FIRST) == "../nvidia0"
    # nvidia_uvm was reloaded.
    uvm = DEVICES[4]._replace(major=511)
    machine.node("/dev/nvidia-uvm", 511, 0)
    machine.hand(REQUEST._replace(devices=tuple(uvm if each.path == uvm.path else each for each in DEVICES)))
    run(machine)
    assert machine.read_link("/dev/char/511:0") == "../nvidia-uvm"
    assert machine.read_link("/dev/char/234:0") is None
    machine.hand(WITHOUT_SECOND)
    run(machine)
    assert machine.read_link(SECOND) is None
    assert machine.read_link(FIRST) == "../nvidia0"
    machine.hand(EMPTY)
    run(machine)
    assert machine.entries("/dev/char") == ()


@pytest.mark.parametrize("granted", [True, False])
def test_foreign_links_stay(machine: Machine, granted: bool) -> None:
    """The GPU Operator's validator makes absolute links."""
    machine.make_directory("/dev/char")
    machine.link(SECOND, "/dev/nvidia1")
    machine.put("/dev/char/195:255", "no link")
    machine.link("/dev/char/1:3", "../null")
    run(machine)
    machine.hand(REQUEST if granted else WITHOUT_SECOND)
    run(machine)
    assert machine.read_link(SECOND) == "/dev/nvidia1"
    assert machine.read("/dev/char/195:255") == b"no link"
    assert machine.read_link("/dev/char/1:3") == "../null"


def test_a_full_dev_costs_only_the_links(machine: Machine) -> None:
    machine.put("/dev/char", "no directory")
    assert machine.verdict("DevicesAllowed") == ("True", "Opened")


def test_a_driver_that_the_machine_does_not_show(machine: Machine) -> None:
    """nspawn may leave out /sys/module. The specification shows whether NVML needs it.

    For a driver that was unloaded, a restart of the machine would not help.
    """
    machine.drop("/sys/module/nvidia/version")
    (machine.tree / "sys/module/nvidia").rmdir()
    assert machine.verdict("DevicesAllowed") == ("True", "DriverHidden")
    assert "; this machine does not show /sys/module/nvidia" in machine.message("DevicesAllowed")
    machine.put("/sys/module/nvidia/version", "550.163.01\n")
    assert machine.verdict("DevicesAllowed") == ("True", "Opened")
    for shown in ("sys/module/nvidia", "proc/driver/nvidia"):
        shutil.rmtree(machine.tree / shown)
    assert machine.verdict("DevicesAllowed") == ("True", "Opened")


@pytest.mark.parametrize("after", range(1, 7))
def test_a_killed_run_leaves_no_link_behind(machine: Machine, after: int) -> None:
    """Each run is killed after that many links; then all GPUs are withdrawn."""
    made = 0

    def kill(path: str) -> None:
        nonlocal made
        made += 1
        if made == after:
            raise KeyboardInterrupt

    context = Context.of(machine, machine.hand(REQUEST))
    machine.after_link = kill
    with pytest.raises(KeyboardInterrupt):
        link_nodes(context, REQUEST)
    machine.after_link = lambda path: None
    link_nodes(context, EMPTY)
    assert machine.entries("/dev/char") == ()


@pytest.mark.parametrize("at", ["removed", "noted", "made"])
def test_a_run_that_is_killed_while_a_number_changes_its_node(machine: Machine, at: str) -> None:
    run(machine)
    machine.node("/dev/nvidia1", 195, 0)
    machine.drop("/dev/nvidia0")
    del machine.nodes["/dev/nvidia0"]
    changed = REQUEST._replace(gpus=GPUS[1:], devices=(DEVICES[1]._replace(minor=0), *DEVICES[2:]))

    def kill(path: str) -> None:
        raise KeyboardInterrupt

    context = Context.of(machine, machine.hand(changed))
    setattr(machine, {"removed": "before_write", "noted": "before_link", "made": "after_link"}[at], kill)
    with pytest.raises(KeyboardInterrupt):
        link_nodes(context, changed)
    machine.before_write = machine.before_link = machine.after_link = lambda path: None
    link_nodes(context, changed)
    assert machine.read_link(FIRST) == "../nvidia1"
    link_nodes(context, EMPTY)
    assert machine.entries("/dev/char") == ()
