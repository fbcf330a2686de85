"""Validation markers: made on proof, removed on failure, and never in the place of another program's file."""

import errno
import os
import subprocess
from collections.abc import Callable

import pytest

from agent.machine.run import run
from agent.vendors.nvidia.contract import DIRECTORY
from tests.fakes.machine import EMPTY, REQUEST, Machine, opening, systemctl

DRIVER, TOOLKIT = f"{DIRECTORY}/driver-ready", f"{DIRECTORY}/toolkit-ready"
KIND = "ValidationMarkersSet"
RUNNING_SINCE = 10**15
"""After every change of its configuration."""


@pytest.fixture
def machine(machine: Machine) -> Machine:
    machine.program("systemctl", systemctl("active", RUNNING_SINCE))
    machine.hand(REQUEST, validation_markers=True)
    return machine


def there(machine: Machine) -> list[str]:
    return list(machine.entries(DIRECTORY)) if machine.is_directory(DIRECTORY) else []


def outcome(machine: Machine) -> tuple[str, str] | None:
    run(machine)
    return machine.conditions().get(KIND)


def seen(machine: Machine) -> tuple[int, ...]:
    status = os.lstat(machine.tree / DRIVER.lstrip("/"))
    return (status.st_mode, status.st_ino, status.st_size, status.st_ctime_ns)


@pytest.mark.processes
def test_the_device_plugins_shell_reads_the_driver_s_place(machine: Machine) -> None:
    """The Operator's entry point runs these commands (assets/state-device-plugin of its release 26.7)."""
    run(machine)
    script = f"set -o allexport; . {machine.tree}{DRIVER}; env"
    found = subprocess.run(["sh", "-euc", script], env={}, capture_output=True, text=True, check=True).stdout
    assert {
        "IS_HOST_DRIVER=true",
        "NVIDIA_DRIVER_ROOT=/",
        "DRIVER_ROOT_CTR_PATH=/host",
        "NVIDIA_DEV_ROOT=/",
        "DEV_ROOT_CTR_PATH=/host",
    } <= set(found.split())


def test_what_is_not_configured_or_has_no_gpu_is_removed(machine: Machine) -> None:
    machine.hand(REQUEST)
    assert outcome(machine) is None
    assert not machine.exists("/run/nvidia")
    for handed, expected in ((EMPTY, ("True", "NotApplicable")), (None, None)):
        machine.hand(REQUEST, validation_markers=True)
        assert outcome(machine) == ("True", "Set")
        machine.hand(handed or REQUEST, validation_markers=handed is not None)
        assert outcome(machine) == expected
        assert there(machine) == []
    machine.put(TOOLKIT, "another program's")
    assert outcome(machine) is None
    assert there(machine) == ["toolkit-ready"]


def test_markers_follow_what_is_proven(machine: Machine) -> None:
    """Doubt removes none: containerd's restart takes a moment, and pods that wait for a marker would restart."""
    machine.program("systemctl", systemctl("inactive", 0))
    assert outcome(machine) == ("Unknown", "NotProven")
    assert machine.message(KIND) == "waiting for RuntimeActive"
    assert there(machine) == ["driver-ready"]
    machine.program("systemctl", systemctl("active", RUNNING_SINCE))
    assert outcome(machine) == ("True", "Set")
    assert there(machine) == ["driver-ready", "toolkit-ready"]
    assert machine.mode(DRIVER) == 0o644
    content = machine.read(DRIVER)
    machine.put(DRIVER, content.splitlines(keepends=True)[0] + b"NVIDIA_DRIVER_ROOT=/elsewhere\n")
    assert outcome(machine) == ("True", "Set")
    assert machine.read(DRIVER) == content
    machine.program("systemctl", systemctl("activating", 0))
    assert outcome(machine) == ("Unknown", "NotProven")
    assert there(machine) == ["driver-ready", "toolkit-ready"]
    machine.program("systemctl", systemctl("failed", 0))
    assert outcome(machine) == ("False", "NotProven")
    assert there(machine) == ["driver-ready"]
    machine.program("systemctl", systemctl("active", RUNNING_SINCE))
    machine.program("nvidia-ctk", "", status=1)
    machine.put("/usr/bin/nvidia-ctk", "another")
    assert outcome(machine) == ("False", "NotProven")
    assert machine.message(KIND) == "a file is missing while a condition that it stands for is False: CDISpecCurrent"
    assert there(machine) == []


def test_a_fault_of_one_gpu_removes_nothing(machine: Machine) -> None:
    """Without the markers, the plugin would not start again, and the node would offer no GPU at all."""
    machine.program("open_nodes", opening(errno.EIO, "/dev/nvidia1"))
    assert machine.verdict("DevicesAllowed") == ("False", "GPUFailed")
    assert outcome(machine) == ("True", "Set")
    assert there(machine) == ["driver-ready", "toolkit-ready"]


@pytest.mark.parametrize(
    "put",
    [
        lambda machine: machine.put(DRIVER, "IS_HOST_DRIVER=false\n"),
        lambda machine: machine.put(DRIVER, ""),
        lambda machine: machine.put(DRIVER, "x" * 10000),
        lambda machine: machine.make_directory(DRIVER),
        lambda machine: machine.link(DRIVER, "/etc/passwd"),
        lambda machine: os.mkfifo(machine.tree / DRIVER.lstrip("/")),
    ],
    ids=["another", "empty", "large", "directory", "link", "fifo"],
)
def test_another_programs_file_is_left_alone(machine: Machine, put: Callable[[Machine], None]) -> None:
    machine.make_directory(DIRECTORY)
    put(machine)
    before = seen(machine)
    assert outcome(machine) == ("False", "ForeignFile")
    assert machine.message(KIND).startswith(f"{DRIVER}: made by another program; ")
    assert seen(machine) == before
    machine.hand(REQUEST)
    assert outcome(machine) is None
    assert seen(machine) == before
    assert there(machine) == ["driver-ready"]


def test_an_error_costs_no_report(machine: Machine) -> None:
    machine.put("/run/nvidia", "a file where the directory should be")
    assert outcome(machine) == ("False", "Failed")


def test_a_kill_between_the_writes_leaves_nothing_behind(machine: Machine) -> None:
    def kill(path: str) -> None:
        if path == TOOLKIT:
            raise KeyboardInterrupt

    machine.before_write = kill
    with pytest.raises(KeyboardInterrupt):
        run(machine)
    machine.before_write = lambda path: None
    assert there(machine) == ["driver-ready"]
    machine.hand(REQUEST)
    assert outcome(machine) is None
    assert there(machine) == []
