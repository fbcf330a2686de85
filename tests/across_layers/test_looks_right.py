"""For each condition, a fault behind which everything looks right: files, units and lists are as they should be.

A condition that only looked at them would be True. docs/conditions.md says who is asked instead.
"""

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from agent.host.state.gpus import record_fault
from agent.model.conditions import ConditionType, Reason, Status, false
from agent.model.facts import GpuFault, Verdict
from agent.model.handoff import FabricAnswer
from agent.model.paths import REPORT_NAME, report_directory
from tests.fakes.gpu_host import MACHINE, UNITS, reconciler
from tests.fakes.host import Host
from tests.fakes.sound_host import ALL_OPEN, make_sound, report, start

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/conditions.md"
FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
KIND = ConditionType


def module_is_unloaded(host: Host) -> None:
    """Libraries, device nodes and the persistence daemon's unit stay."""
    host.remove_file("/sys/module/nvidia/version")


def node_of_an_earlier_module(host: Host) -> None:
    """The node exists, with the number that nvidia-uvm had before it was loaded again."""
    host.node("/dev/nvidia-uvm", 499, 0)


def gpu_leaves_the_bus(host: Host) -> None:
    """Its node stays in /dev."""
    host.unplug(SECOND)


def gpu_has_failed(host: Host) -> None:
    """It is on the bus, has its driver and its node, and the node opened when it was asked."""
    fault = GpuFault("Xid48", "Xid 48: simulated", 1000.0, Verdict.NEEDS_RESET, 1000.0)
    host.symlink(f"/sys/bus/pci/devices/{SECOND}", f"../../../devices/pci0000:00/{SECOND}")
    assert record_fault(host, SECOND, fault)


def listed_file_is_gone(host: Host) -> None:
    """The loader's cache goes on listing it. The module's version rules out the staged copy."""
    for path in Path(host.root).glob("usr/lib/x86_64-linux-gnu/**/libcuda.so*"):
        path.unlink()
    host.file("/sys/module/nvidia/version", "535.261.03\n")


def gpus_do_not_register(host: Host) -> None:
    """The Fabric Manager's unit is active."""
    host.bus.unit(UNITS[2], "active")
    answers = (FabricAnswer(FIRST, "In Progress", "N/A"), FabricAnswer(SECOND, "In Progress", "N/A"))
    report(host, ALL_OPEN, fabric=answers)


def driver_root_is_not_mounted(host: Host) -> None:
    """Its files are complete, and the mount's unit exists."""
    for unit in [*host.bus.mounts.mounted]:
        if unit.endswith("host\\x2dnvidia-0.mount"):
            host.bus.mounts.broken.add(unit)
            host.bus.mounts.job("StopUnit", unit)


def machine_is_silent(host: Host) -> None:
    """Its unit is active, but nothing in it reports."""
    host.remove(f"{report_directory(MACHINE)}/{REPORT_NAME}")


def one_of_all_is_false(host: Host) -> None:
    report(host, ALL_OPEN, false(KIND.RUNTIME_ACTIVE, Reason.CRI_FAILED, "simulated"))


ON_THE_HOST: Mapping[ConditionType, Callable[[Host], None]] = {
    KIND.DRIVER_LOADED: module_is_unloaded,
    KIND.DEVICES_PRESENT: node_of_an_earlier_module,
    KIND.GPUS_COMPLETE: gpu_leaves_the_bus,
    KIND.GPUS_HEALTHY: gpu_has_failed,
    KIND.LIBRARIES_PRESENT: listed_file_is_gone,
    KIND.FABRIC_READY: gpus_do_not_register,
    KIND.DRIVER_ROOT_STAGED: driver_root_is_not_mounted,
    KIND.LIBRARIES_LINKED: machine_is_silent,
    KIND.READY: one_of_all_is_false,
}
IN_THE_MACHINE: Mapping[ConditionType, str] = {
    KIND.DEVICES_ALLOWED: "test_run.py::test_a_node_that_does_not_open",
    KIND.LIBRARIES_LINKED: "libraries/test_link.py::test_a_stub_that_the_loader_prefers_is_reported",
    KIND.CDI_SPEC_CURRENT: "test_run.py::test_a_wrong_number_is_named_with_the_expected_one",
    KIND.RUNTIME_CONFIGURED: "containerd/test_configure.py::test_lost_and_changed_settings_are_found",
    KIND.RUNTIME_ACTIVE: "containerd/test_active.py::test_a_plugin_that_failed_is_reported_in_containerds_words",
    KIND.VALIDATION_MARKERS_SET: "kubelet/test_validation_markers.py::test_markers_follow_what_is_proven",
    KIND.GPUS_TESTED: "test_gpu_tests.py::test_how_a_test_ends",
    KIND.GPUS_ADVERTISED: "kubelet/test_device_plugin.py::test_a_plugin_that_exited_or_was_killed",
    KIND.NODE_CONDITION_SET: "kubelet/test_node_condition.py::test_refusals_are_quoted_and_retried",
}
INFERRED = {KIND.PERSISTENCE_MODE, KIND.MACHINE_RUNNING}
"""Conditions that are only inferred from a unit's state."""


@pytest.fixture
def running(gpu_host: Host) -> Host:
    make_sound(gpu_host)
    start(gpu_host, reconciler(gpu_host))
    return gpu_host


@pytest.mark.parametrize("kind", ON_THE_HOST, ids=str)
def test_what_only_looks_right_is_not_true(running: Host, kind: ConditionType) -> None:
    (machine,) = reconciler(running).reconcile().machines
    assert {each.status for each in machine.conditions} == {Status.TRUE}
    ON_THE_HOST[kind](running)
    (machine,) = reconciler(running).reconcile().machines
    assert machine.condition(kind).status is not Status.TRUE


def test_each_condition_is_in_one_of_the_lists() -> None:
    """And the tests of the machine half exist."""
    assert {*ON_THE_HOST, *IN_THE_MACHINE, *INFERRED} == set(ConditionType)
    for path, _, name in (test.partition("::") for test in IN_THE_MACHINE.values()):
        functions = ast.parse((REPOSITORY / "tests/machine" / path).read_text()).body
        assert name in {each.name for each in functions if isinstance(each, ast.FunctionDef)}


def test_the_page_says_of_each_condition_who_is_asked() -> None:
    table = PAGE.read_text().partition("### Who is asked\n")[2].partition("\n\nIf")[0]
    assert re.findall(r"^\| (\w+) \|", table, re.MULTILINE)[1:] == [each.value for each in ConditionType]
