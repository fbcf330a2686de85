"""What a fault costs: one bad GPU costs that GPU, and a host whose GPUs are all dead is no host without GPUs."""

import time
from collections.abc import Callable

import pytest

from agent.cli.output import causes
from agent.host.reconcile import MachineOutcome, Reconciler
from agent.host.state.gpus import forget_fault, observe_gpus, record_fault, record_recovered
from agent.model.conditions import Condition, ConditionType, Reason, Status, false
from agent.model.facts import GpuFault, Verdict
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


def node_is_gone(host: Host, path: str = "/dev/nvidia1") -> None:
    host.remove_file(path)
    del host.device_numbers[path]


def node_and_daemon_are_gone(host: Host) -> None:
    host.bus.unit(UNITS[1], "inactive")
    node_is_gone(host)


def nodes_are_gone(host: Host) -> None:
    node_is_gone(host)
    node_is_gone(host, "/dev/nvidia-uvm")


SOME, MISSING = (Status.TRUE, "SomeGPUsUnusable"), (Status.FALSE, "NodesMissing")
NO_FIRST = false(ConditionType.DEVICES_ALLOWED, Reason.GPU_FAILED, "simulated", (FIRST,))
NO_SECOND = NO_FIRST._replace(gpus=(SECOND,))
LEFT_OUT = false(ConditionType.CDI_SPEC_CURRENT, Reason.GPU_MISSING, "simulated", (SECOND,))
FAULTS: dict[str, tuple[Callable[[Host], object], tuple[Condition, ...], tuple[Status, str]]] = {
    "none": (lambda _: None, (ALL_OPEN,), (Status.TRUE, "AllConditionsTrue")),
    "its node is gone": (node_is_gone, (ALL_OPEN,), SOME),
    "it has no driver": (lambda host: host.rebind(SECOND, ""), (ALL_OPEN,), SOME),
    "it does not open": (lambda _: None, (NO_SECOND,), SOME),
    "the generator leaves it out": (lambda _: None, (ALL_OPEN, LEFT_OUT), SOME),
    # What Ready does not need counts for no GPU.
    "and the persistence daemon": (node_and_daemon_are_gone, (ALL_OPEN,), SOME),
    # Each fault alone concerns one GPU.
    "faults of all GPUs": (node_is_gone, (NO_FIRST,), MISSING),
    # It is not hidden by the fault of one GPU.
    "a fault that all share": (nodes_are_gone, (ALL_OPEN,), MISSING),
    # Only a condition that is False concerns some GPUs: Unknown proves nothing about the others.
    "what is not a fault": (
        lambda _: None,
        (ALL_OPEN, LEFT_OUT._replace(status=Status.UNKNOWN, reason="NotTried")),
        (Status.UNKNOWN, "NotTried"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_bad_gpu_does_not_take_the_node_from_the_others(running: Host, fault: str) -> None:
    """A GPU that had left the bus cost only itself, and a GPU without its node cost the whole machine."""
    seed, said, expected = FAULTS[fault]
    seed(running)
    agent = reconciler(running)
    agent.reconcile()
    report(running, *said)
    machine = evaluate(agent)
    assert ready(machine) == expected
    if expected == SOME:
        assert f"pods cannot use {SECOND}" in machine.ready.message
    if fault == "a fault that all share":
        assert "/dev/nvidia-uvm is missing" in machine.ready.message


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


# ---- verdicts


def bad(host: Host, address: str, verdict: Verdict, since: float | None = None) -> None:
    at = time.time() if since is None else since
    if host.link_inode(f"/sys/bus/pci/devices/{address}") is None:
        host.symlink(f"/sys/bus/pci/devices/{address}", f"../../../devices/pci0000:00/{address}")
    assert record_fault(host, address, GpuFault("Xid48", "Xid 48: simulated", at, verdict, at))


@pytest.mark.parametrize(
    ("verdict", "reason", "words"),
    [
        (Verdict.NEEDS_RESET, "GPUNeedsReset", "needs a reset"),
        (Verdict.NEEDS_REBOOT, "GPUNeedsReboot", "needs a reboot of the host"),
        (Verdict.BROKEN, "GPUBroken", "is broken"),
    ],
)
def test_a_gpu_that_pods_cannot_rely_on_costs_itself(running: Host, verdict: Verdict, reason: str, words: str) -> None:
    bad(running, SECOND, verdict)
    machine = evaluate(reconciler(running))
    found = machine.condition(ConditionType.GPUS_HEALTHY)
    assert (found.status, found.reason, found.gpus) == (Status.FALSE, reason, (SECOND,))
    assert found.message == f"{SECOND} {words}: Xid 48: simulated"
    assert ready(machine) == SOME
    bad(running, FIRST, Verdict.NEEDS_RESET)
    assert ready(evaluate(reconciler(running))) == (Status.FALSE, reason)


def test_a_machine_that_needs_all_its_gpus_is_not_ready_without_one(running: Host) -> None:
    agent = reconciler(running, min_healthy_gpus=2)
    assert ready(evaluate(agent)) == (Status.TRUE, "AllConditionsTrue")
    bad(running, SECOND, Verdict.NEEDS_RESET)
    machine = evaluate(agent)
    assert ready(machine) == (Status.FALSE, "TooFewHealthyGPUs")
    assert "1 GPU can serve pods, but min_healthy_gpus is 2" in machine.ready.message
    assert SECOND in machine.ready.message


def test_a_degraded_gpu_serves_and_is_healthy_again_after_a_normal_time(running: Host) -> None:
    bad(running, SECOND, Verdict.DEGRADED)
    machine = evaluate(reconciler(running))
    found = machine.condition(ConditionType.GPUS_HEALTHY)
    assert (found.status, found.reason) == (Status.TRUE, "GPUDegraded")
    assert ready(machine) == (Status.TRUE, "AllConditionsTrue")
    # That such an error came an hour ago says nothing now.
    forget_fault(running, SECOND)
    bad(running, SECOND, Verdict.DEGRADED, time.time() - 3600)
    assert evaluate(reconciler(running)).condition(ConditionType.GPUS_HEALTHY).reason == "Healthy"


def test_only_the_drivers_word_ends_a_verdict(running: Host) -> None:
    """A worse error counts, a lesser one does not, and time alone ends nothing that needs an action."""
    bad(running, FIRST, Verdict.NEEDS_RESET, since=1000.0)
    record_fault(running, FIRST, GpuFault("Xid63", "", 2000.0, Verdict.DEGRADED, 2000.0))
    assert observe_gpus(running).faults[FIRST].reason == "Xid48"
    # What was said before the last error ends nothing.
    assert not record_recovered(running, FIRST, 2000.0)
    assert record_recovered(running, FIRST, time.time())
    assert not observe_gpus(running).faults
    bad(running, FIRST, Verdict.BROKEN, since=1000.0)
    # A lesser line with the same reason does not give the GPU back.
    record_fault(running, FIRST, GpuFault("Xid48", "a lesser line", 2000.0, Verdict.DEGRADED, 2000.0))
    assert not record_recovered(running, FIRST, time.time())
    assert observe_gpus(running).faults[FIRST].verdict is Verdict.BROKEN
