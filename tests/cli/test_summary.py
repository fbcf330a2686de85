"""What is printed about machines: in 80 columns, each cause once, what is wrong first."""

import re
from typing import Any

import pytest

from agent.cli.output import causes, duration, summaries
from agent.host.reconcile import MachineOutcome
from agent.model.conditions import Condition, ConditionType, Reason, Status, false, unknown
from tests.fakes.reconciler import GPUS, conditions

LONG = "the kernel module nvidia is not loaded; run `modprobe -a nvidia nvidia_uvm`, " + "and more " * 20
NOT_LOADED = false(ConditionType.DRIVER_LOADED, Reason.MODULE_NOT_LOADED, LONG)
NO_DAEMON = false(ConditionType.PERSISTENCE_MODE, Reason.DAEMON_NOT_RUNNING, "start it")
SILENT = [
    unknown(kind, Reason.NO_REPORT, "the machine has not reported")
    for kind in ConditionType
    if kind.name.startswith(("RUNTIME", "LIBRARIES_LINKED", "CDI", "GPUS_ADVERTISED", "VALIDATION"))
]
OFF = false(ConditionType.MACHINE_RUNNING, Reason.STOPPED, "machine gpu-node was stopped")
FOLLOWS = [unknown(each.type, Reason.MACHINE_NOT_RUNNING, "machine gpu-node is not running") for each in SILENT]


@pytest.fixture(autouse=True)
def five_minutes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_700_000_300.0)


def machine(name: str, *different: Condition) -> MachineOutcome:
    return MachineOutcome(name, conditions(*different), gpus=GPUS)


def lines(*machines: MachineOutcome, width: int = 80, colour: bool = False, whole: bool = True) -> list[str]:
    return list(summaries(machines, width=width, colour=colour, whole=whole))


def test_what_is_wrong_comes_first() -> None:
    found = lines(machine("a"), machine("b", *SILENT), machine("c", NOT_LOADED))
    assert [each.partition(",")[0] for each in found if not each.startswith(" ")] == [
        "c: not ready",
        "b: unknown",
        "a: ready",
    ]


def test_one_entry_for_one_cause() -> None:
    assert lines(machine("gpu-node", *SILENT)) == [
        "gpu-node: unknown, NoReport, for 5 min, 2 GPUs",
        "  LibrariesLinked, CDISpecCurrent and 4 more: Unknown, NoReport",
        "    the machine has not reported",
    ]
    assert lines(machine("gpu-node")) == ["gpu-node: ready, for 5 min, 2 GPUs"]
    ready = Condition(ConditionType.READY, Status.TRUE, Reason.NO_GPU, "this host has no GPU: no GPU is set up")
    assert list(summaries([MachineOutcome("a", (ready,))])) == [
        "a: ready, NoGPU, 0 GPUs",
        "    this host has no GPU: no GPU is set up",
    ]
    found = lines(machine("gpu-node", OFF, *FOLLOWS))
    assert found == [
        "gpu-node: not ready, Stopped, for 5 min, 2 GPUs",
        "  MachineRunning: False, Stopped",
        "    machine gpu-node was stopped",
    ]
    found = lines(machine("a", NOT_LOADED, *SILENT), whole=False)
    assert len(found) == 3
    assert found[1].startswith("  DriverLoaded: False, ModuleNotLoaded: the kernel module")
    assert found[1].endswith("...")


def test_faults_that_ready_ignores_come_last() -> None:
    groups = causes(conditions(NO_DAEMON, *SILENT, NOT_LOADED))
    assert [group[0].reason for group in groups] == ["ModuleNotLoaded", "NoReport", "DaemonNotRunning"]
    assert "  PersistenceMode: False, DaemonNotRunning (not needed for Ready)" in lines(machine("a", NO_DAEMON))


def test_a_cause_of_ready_itself_is_listed() -> None:
    """Settling has no other condition. GPUsComplete makes Ready False only if all GPUs are lost."""
    settling = false(ConditionType.READY, Reason.SETTLING, "it becomes True in a minute")
    lost = false(ConditionType.GPUS_COMPLETE, Reason.GPU_LOST, "left the PCI bus")
    all_lost = false(ConditionType.READY, Reason.GPU_LOST, "GPUsComplete: left the PCI bus")
    found = [lines(MachineOutcome("a", (NO_DAEMON, lost, ready)))[1:] for ready in (settling, all_lost)]
    daemon = ["  PersistenceMode: False, DaemonNotRunning (not needed for Ready)", "    start it"]
    assert found == [
        [
            "  Ready: False, Settling",
            "    it becomes True in a minute",
            *daemon,
            "  GPUsComplete: False, GPULost (not needed for Ready)",
            "    left the PCI bus",
        ],
        ["  GPUsComplete, Ready: False, GPULost", "    left the PCI bus", *daemon],
    ]


@pytest.mark.parametrize("style", [{}, {"whole": False}, {"width": 120}])
def test_lines_fit(style: dict[str, Any]) -> None:
    found = lines(machine("a", NOT_LOADED, *SILENT), machine("b", NO_DAEMON), **style)
    assert max(map(len, found)) <= style.get("width", 80)


def test_long_names_are_not_broken() -> None:
    """Users copy paths and commands from the output."""
    unit = "usr-lib-unbounded\\x2dagent-with-a-name-that-is-longer-than-a-whole-line-of-a-terminal.mount"
    fault = false(ConditionType.DRIVER_ROOT_STAGED, Reason.NOT_MOUNTED, f"see `systemctl status '{unit}'` on the host")
    (_, _, *message) = lines(machine("a", fault))
    assert any(unit in line for line in message)


def test_colours_are_for_terminals() -> None:
    found = lines(machine("a", NOT_LOADED), colour=True)[0]
    assert found.startswith("a: \x1b[1;31mnot ready\x1b[0m, ModuleNotLoaded")
    assert re.sub(r"\x1b\[[0-9;]*m", "", found) == lines(machine("a", NOT_LOADED))[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (59.9, "59 s"),
        (119.9, "119 s"),
        (120, "2 min"),
        (3599, "59 min"),
        (5400, "90 min"),
        (86399, "23 h"),
        (86400 * 30, "30 d"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
