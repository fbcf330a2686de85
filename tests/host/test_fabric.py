"""Whole passes on a host whose GPUs have a fabric: a change of the Fabric Manager makes the machine ask the GPUs."""

import pytest

from agent.host.reconcile import Reconciler
from agent.host.state.records import read_history, write_history
from agent.host.verify.readiness import STARTING_LIMIT
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.errors import BusError
from agent.model.facts import PciDevice
from agent.model.handoff import FabricAnswer
from agent.model.paths import fabric_file
from tests.fakes import sound_host
from tests.fakes.gpu_host import MACHINE, UNITS, reconciler, units
from tests.fakes.host import Host
from tests.fakes.sound_host import ALL_OPEN

GPUS = ("0000:01:00.0", "0000:02:00.0")
MANAGER = UNITS[2]
KIND = ConditionType.FABRIC_READY
FILE = fabric_file(MACHINE)


def report(host: Host, state: str = "", status: str = "N/A", gpus: tuple[str, ...] = GPUS) -> None:
    """Let the machine answer the handoff; without a state, no GPU answers about its fabric."""
    sound_host.report(host, ALL_OPEN, fabric=tuple(FabricAnswer(gpu, state, status) for gpu in gpus if state))


@pytest.fixture
def agent(gpu_host: Host) -> Reconciler:
    """The agent of a host with a running machine, and a Fabric Manager that is installed and stopped."""
    agent = reconciler(gpu_host)
    sound_host.start(gpu_host, agent)
    report(gpu_host, "N/A")
    agent.reconcile()
    return agent


def passed(agent: Reconciler) -> dict[ConditionType, Condition]:
    (machine,) = agent.run_pass().machines
    return {each.type: each for each in machine.conditions}


def test_a_fault_ends_only_by_the_gpus_own_word(agent: Reconciler, gpu_host: Host) -> None:
    """The Fabric Manager becomes active while the GPUs are not registered: no inference makes FabricReady True."""
    assert passed(agent)[KIND].reason == "NotApplicable"
    report(gpu_host, "In Progress")
    found = passed(agent)
    assert (found[KIND].reason, found[ConditionType.READY].status) == ("FabricNotRegistered", Status.FALSE)
    gpu_host.bus.unit(MANAGER, "active", started_at=4711)
    found = passed(agent)
    assert (found[KIND].status, found[KIND].reason) == (Status.FALSE, "FabricNotRegistered")
    report(gpu_host)
    assert passed(agent)[KIND].status is Status.FALSE, "nvidia-smi got no answer"
    report(gpu_host, "In Progress")
    assert passed(agent)[KIND].status is Status.FALSE
    report(gpu_host, "Completed", "Success")
    found = passed(agent)
    assert (found[KIND].reason, found[ConditionType.READY].status) == ("FabricRegistered", Status.TRUE)
    units(gpu_host, "inactive", stopped_at=1)
    gpu_host.bus.unit(MANAGER, "active", started_at=4711)
    stopped = passed(agent)[KIND]
    assert stopped.reason == "NotApplicable"
    assert "inferred: no answer from" in stopped.message
    assert "machine gpu-node is not running" in stopped.message


def test_a_start_of_the_fabric_manager_is_published_once_and_costs_no_ready(agent: Reconciler, gpu_host: Host) -> None:
    """A Fabric Manager that crashes again and again is active at most looks; the time of its start shows it."""
    seen = list[tuple[int, bytes]]()
    for started in (1, 1, 2, 2):
        gpu_host.bus.unit(MANAGER, "active", started_at=started)
        if not seen:
            agent.run_pass()
            report(gpu_host, "Completed", "Success")
        found = passed(agent)
        assert (found[KIND].reason, found[ConditionType.READY].status) == ("FabricRegistered", Status.TRUE)
        seen.append((gpu_host.identity(FILE).inode, gpu_host.read(FILE)))
    assert [seen[0] == seen[1], seen[2] == seen[3]] == [True, True], "an unchanged file wakes nobody"
    assert seen[1][1] != seen[2][1]
    for unit in UNITS[1:]:
        gpu_host.bus.unit(unit, "inactive", "not-found")
    agent.run_pass()
    assert not gpu_host.exists(FILE)


def test_a_fabric_manager_that_could_not_be_observed_is_no_change(agent: Reconciler, gpu_host: Host) -> None:
    gpu_host.bus.unit(MANAGER, "active", started_at=1)
    agent.run_pass()
    before = gpu_host.read(FILE), gpu_host.identity(FILE)
    gpu_host.bus.unit(MANAGER, "active", started_at="never")  # type: ignore[arg-type]
    assert agent.run_pass().actions == ()
    gpu_host.bus.failing = BusError("PID 1 does not answer")
    agent.run_pass()
    assert (gpu_host.read(FILE), gpu_host.identity(FILE)) == before


def switched(host: Host) -> None:
    """Let the host show an NVSwitch, so that the Fabric Manager's unit says something."""
    assert isinstance(host.pci, tuple)
    host.pci = (*host.pci, PciDevice("0000:05:00.0", 0x10DE, 0x068000, "nvidia-nvswitch"))


@pytest.mark.parametrize("between", ["activating", "reloading", "failed", "restarted systemd"])
def test_a_pass_that_sees_the_fabric_manager_start_ends_no_fault(
    agent: Reconciler, gpu_host: Host, between: str
) -> None:
    """GPUs that had failed to register were taken for registered, once the unit had been seen activating."""
    switched(gpu_host)
    gpu_host.bus.unit(MANAGER, "active", started_at=1)
    agent.run_pass()
    report(gpu_host, "Completed", "Insufficient Resources")
    assert passed(agent)[KIND].reason == "FabricFailed"
    report(gpu_host)
    assert passed(agent)[KIND].reason == "FabricFailed"
    if between == "restarted systemd":
        gpu_host.bus.failing = BusError("PID 1 does not answer")
    gpu_host.bus.unit(MANAGER, between)
    found = passed(agent)
    assert found[ConditionType.READY].status is not Status.TRUE
    gpu_host.bus.failing = None
    gpu_host.bus.unit(MANAGER, "active", started_at=2)
    agent.run_pass()
    report(gpu_host)
    found = passed(agent)
    assert (found[KIND].status, found[KIND].reason) == (Status.FALSE, "FabricFailed")
    assert found[ConditionType.READY].status is Status.FALSE
    report(gpu_host, "Completed", "Success")
    assert passed(agent)[KIND].reason == "FabricRegistered"
    report(gpu_host)
    assert passed(agent)[KIND].status is Status.TRUE, "their last word is that they are registered"


def test_gpus_that_fall_silent_are_late_all_the_same(agent: Reconciler, gpu_host: Host) -> None:
    gpu_host.bus.unit(MANAGER, "active", started_at=1)
    agent.run_pass()
    report(gpu_host, "In Progress")
    assert passed(agent)[KIND].reason == "FabricRegistering"
    report(gpu_host)
    assert passed(agent)[KIND].reason == "FabricRegistering"
    (conditions,) = read_history(gpu_host).values()
    older = [each._replace(last_transition=each.last_transition - STARTING_LIMIT - 1) for each in conditions]
    write_history(gpu_host, {MACHINE: tuple(older)})
    found = passed(agent)
    assert (found[KIND].status, found[KIND].reason) == (Status.FALSE, "FabricNotRegistered")
    assert found[ConditionType.READY].status is Status.FALSE


def test_a_gpu_that_fell_silent_costs_only_itself_unless_it_is_the_only_one(agent: Reconciler, gpu_host: Host) -> None:
    """The other GPU was detached, and yet Ready was True: "all other GPUs"."""
    gpu_host.bus.unit(MANAGER, "active", started_at=1)
    agent.run_pass()
    report(gpu_host, "Completed", "Insufficient Resources", GPUS[:1])
    assert passed(agent)[ConditionType.READY].reason == "SomeGPUsUnusable"
    report(gpu_host, "Completed", "Success", GPUS[1:])
    found = passed(agent)
    assert (found[KIND].reason, found[KIND].gpus) == ("FabricFailed", GPUS[:1])
    assert found[ConditionType.READY].reason == "SomeGPUsUnusable"
    report(gpu_host)
    assert passed(agent)[KIND].gpus == GPUS[:1]
    only_first = reconciler(gpu_host, gpus=[GPUS[0]])
    only_first.run_pass()
    report(gpu_host)
    found = passed(only_first)
    assert (found[KIND].reason, found[KIND].gpus) == ("FabricFailed", ())
    assert found[ConditionType.READY].reason == "FabricFailed"
    only_second = reconciler(gpu_host, gpus=[GPUS[1]])
    only_second.run_pass()
    report(gpu_host)
    assert passed(only_second)[KIND].status is Status.TRUE, "the fault is another GPU's"
