"""What a fault costs: one bad GPU costs that GPU, and a host whose GPUs are all dead is no host without GPUs."""

from collections.abc import Callable

import pytest

from agent.cli.output import causes
from agent.host.reconcile import MachineOutcome, Reconciler
from agent.model.conditions import Condition, ConditionType, Reason, Status, false
from agent.model.errors import BusError
from tests.fakes.gpu_host import MACHINE, UNITS, reconciler, units
from tests.fakes.host import Host
from tests.fakes.sound_host import ALL_OPEN, make_sound, report, start

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"


@pytest.fixture
def running(gpu_host: Host) -> Host:
    make_sound(gpu_host)
    start(gpu_host, reconciler(gpu_host))
    return gpu_host


def evaluate(agent: Reconciler) -> MachineOutcome:
    (machine,) = agent.reconcile().machines
    return machine


def ready(machine: MachineOutcome) -> tuple[Status, str]:
    return machine.ready.status, machine.ready.reason


def node_is_gone(host: Host) -> None:
    host.remove_file("/dev/nvidia1")
    del host.device_numbers["/dev/nvidia1"]


def no_driver(host: Host) -> None:
    host.rebind(SECOND, "")


def second(kind: ConditionType, reason: Reason) -> Condition:
    return false(kind, reason, "simulated", (SECOND,))


FAULTS: dict[str, Callable[[Host], None]] = {
    "its node is gone": node_is_gone,
    "it has no driver": no_driver,
    "it does not open": lambda host: report(host, second(ConditionType.DEVICES_ALLOWED, Reason.GPU_FAILED)),
    "the generator leaves it out": lambda host: report(
        host, ALL_OPEN, second(ConditionType.CDI_SPEC_CURRENT, Reason.GPU_MISSING)
    ),
}


@pytest.mark.parametrize("seed", FAULTS.values(), ids=FAULTS)
def test_one_bad_gpu_does_not_take_the_node_from_the_others(running: Host, seed: Callable[[Host], None]) -> None:
    """A GPU that had left the bus cost only itself, and a GPU without its node cost the whole machine."""
    assert ready(evaluate(reconciler(running))) == (Status.TRUE, "AllConditionsTrue")
    seed(running)
    agent = reconciler(running)
    agent.reconcile()
    if seed in (FAULTS["its node is gone"], FAULTS["it has no driver"]):
        report(running, ALL_OPEN)  # to the handoff without that node
    machine = evaluate(agent)
    assert ready(machine) == (Status.TRUE, "SomeGPUsUnusable")
    assert f"pods cannot use {SECOND}" in machine.ready.message
    assert [each.gpus for each in machine.conditions if each.status is Status.FALSE] == [(SECOND,)]


def test_what_ready_does_not_need_counts_for_no_gpu(running: Host) -> None:
    """The persistence daemon of all GPUs made the fault of one of them the fault of all."""
    running.bus.unit(UNITS[1], "inactive")
    node_is_gone(running)
    agent = reconciler(running)
    agent.reconcile()
    report(running, ALL_OPEN)
    assert ready(evaluate(agent)) == (Status.TRUE, "SomeGPUsUnusable")


def test_faults_of_all_gpus_together_take_the_node(running: Host) -> None:
    """Each fault alone concerns one GPU."""
    node_is_gone(running)
    agent = reconciler(running)
    agent.reconcile()
    report(running, false(ConditionType.DEVICES_ALLOWED, Reason.GPU_FAILED, "simulated", (FIRST,)))
    assert ready(evaluate(agent)) == (Status.FALSE, "NodesMissing")


def test_a_fault_that_all_gpus_share_takes_the_node(running: Host) -> None:
    """It is not hidden by the fault of one GPU."""
    node_is_gone(running)
    running.remove_file("/dev/nvidia-uvm")
    del running.device_numbers["/dev/nvidia-uvm"]
    machine = evaluate(reconciler(running))
    assert ready(machine) == (Status.FALSE, "NodesMissing")
    assert "/dev/nvidia-uvm is missing" in machine.ready.message


def test_a_machine_cannot_limit_what_is_not_a_fault(running: Host) -> None:
    """Only a condition that is False concerns some GPUs: Unknown proves nothing about the others."""
    unknown = Condition(ConditionType.CDI_SPEC_CURRENT, Status.UNKNOWN, "NotTried", "simulated", gpus=(SECOND,))
    report(running, ALL_OPEN, unknown)
    assert ready(evaluate(reconciler(running))) == (Status.UNKNOWN, "NotTried")


def test_files_that_vanish_from_the_host_do_not_take_the_node(running: Host) -> None:
    """Machines use the staged copy. If the module had another version, they could not."""
    running.loader_cache("0 libs found in cache `/etc/ld.so.cache'\n")
    machine = evaluate(reconciler(running))
    assert ready(machine) == (Status.TRUE, "AllConditionsTrue")
    found = machine.condition(ConditionType.LIBRARIES_PRESENT)
    assert (found.status, found.reason) == (Status.TRUE, "OnlyStaged")
    assert "install the driver's user-space libraries" in found.message
    running.file("/sys/module/nvidia/version", "535.261.03\n")
    assert evaluate(reconciler(running)).condition(ConditionType.LIBRARIES_PRESENT).status is Status.FALSE


def test_while_systemd_does_not_answer_the_machine_does_not_count_as_stopped(running: Host) -> None:
    """Seven conditions said that it was not running, although it ran."""
    running.bus.failing = BusError("systemd does not answer")
    machine = evaluate(reconciler(running))
    assert machine.ready.status is Status.UNKNOWN
    assert {each.reason for each in machine.conditions if each.status is Status.UNKNOWN} == {"ObservationFailed"}
    assert not any("is not running" in each.message for each in machine.conditions)


# ---- hosts whose buses show no GPU


def without(host: Host, *, driver: bool) -> Host:
    for address in (FIRST, SECOND):
        host.unplug(address)
    if not driver:
        host.loader_cache("0 libs found in cache `/etc/ld.so.cache'\n")
    return host


def test_a_host_whose_gpus_are_all_dead_at_the_first_start_is_not_ready(gpu_host: Host) -> None:
    """It counted as a host without GPUs, and fleets took it into use."""
    machine = evaluate(reconciler(without(gpu_host, driver=True)))
    assert ready(machine) == (Status.FALSE, "NoGPU")
    assert "driver 550.163.01 is installed" in machine.ready.message
    assert f"set machines.{MACHINE}.require_gpus = false" in machine.ready.message
    assert machine.ready in [each for group in causes(machine.conditions) for each in group], "not only MachineRunning"
    assert ready(evaluate(reconciler(gpu_host, require_gpus=False))) == (Status.TRUE, "NoGPU")


@pytest.mark.parametrize("settings", [{"gpus": "count=2"}, {"gpus": [FIRST]}, {"mig_config": True}], ids=str)
def test_settings_that_ask_for_gpus_say_that_the_host_has_some(gpu_host: Host, settings: dict[str, object]) -> None:
    without(gpu_host, driver=False)
    assert ready(evaluate(reconciler(gpu_host))) == (Status.TRUE, "NoGPU")
    machine = evaluate(reconciler(gpu_host, **settings))
    assert ready(machine) == (Status.FALSE, "NoGPU")
    assert f"setting `{next(iter(settings))}`" in machine.ready.message


def test_a_machine_without_gpus_that_does_not_run_is_not_called_running(gpu_host: Host) -> None:
    """All conditions were True, MachineRunning too."""
    without(gpu_host, driver=False)
    for state, status in (("active", Status.TRUE), ("failed", Status.FALSE), ("activating", Status.UNKNOWN)):
        units(gpu_host, state)
        assert evaluate(reconciler(gpu_host)).condition(ConditionType.MACHINE_RUNNING).status is status
