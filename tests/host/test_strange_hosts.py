"""Text of drivers goes only where it belongs, and what disappears for a while, or during a pass, is kept."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.cli.prepare import prepare
from agent.host.reconcile import Outcome
from agent.host.state.gpus import record_detached
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.errors import BusAnswerError, BusError
from agent.model.facts import parse_live, render_live
from agent.model.handoff import parse_handoff
from agent.model.paths import MACHINE_ROOTS, granted_file, handoff_file, live_file, nspawn_file, unit_drop_in
from agent.model.text import MESSAGE_LIMIT
from agent.system.systemd import MACHINED
from tests.fakes.gpu_host import MACHINE, UNITS, reconciler, units
from tests.fakes.host import INFORMATION, Host
from tests.fakes.reports import condition
from tests.fakes.running import allowed, running

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
LONG = 1 << 16
HOSTILE = {
    "long": "x" * LONG,
    "quotes": "\"';$(reboot)`reboot`" * 3000,
    "specifiers": "%n%%i{{ $labels }}" * 3000,
    "lines": "a\nGPU Excluded: no\n\x1b[2J\r\nDeviceAllow=/dev/mem rw\n" * 2000,
    "format characters": "\u202e\u2066" * 20000,
}
WRITTEN = (nspawn_file(MACHINE), unit_drop_in(MACHINE), handoff_file(MACHINE), granted_file(MACHINE))


def test_a_model_of_64_kib_reaches_no_settings_and_no_message(gpu_host: Host) -> None:
    """The firmware names the model, and the driver prints the name in /proc."""
    agent = reconciler(gpu_host)
    agent.reconcile()
    before = [gpu_host.read(path) for path in WRITTEN]
    for what, model in HOSTILE.items():
        information = INFORMATION.format(minor=1, address=SECOND).replace("NVIDIA H100 80GB HBM3", model)
        gpu_host.file(f"/proc/driver/nvidia/gpus/{SECOND}/information", information)
        assert agent.reconcile().failures == (), what
        assert [gpu_host.read(path) for path in WRITTEN] == before, what
        gpu_host.unplug(SECOND)
        machine = agent.reconcile().machines[0]
        for each in machine.conditions:
            assert each.message.isprintable(), what
            assert len(each.message) <= MESSAGE_LIMIT, (what, each.type)
        assert SECOND in machine.condition(ConditionType.GPUS_COMPLETE).message
        gpu_host.gpu(SECOND, 1)
        agent.reconcile()


def test_a_machine_that_is_removed_during_a_pass_is_not_recreated(gpu_host: Host) -> None:
    """`machinectl remove` deletes its files and its settings."""
    running(gpu_host)
    gpu_host.gpu("0000:03:00.0", 2)
    agent = reconciler(gpu_host)
    permitted = gpu_host.bus_caller

    def removed(
        service: str, path: str, method: str, signature: str, arguments: tuple[object, ...], timeout: float
    ) -> tuple[object, ...]:
        if method.endswith("SetUnitProperties"):
            gpu_host.remove_tree(f"{MACHINE_ROOTS}/{MACHINE}")
            gpu_host.remove(nspawn_file(MACHINE))
        return permitted(service, path, method, signature, arguments, timeout)

    gpu_host.bus_caller = removed
    agent.reconcile()
    gpu_host.bus_caller = permitted
    assert "SetUnitProperties" in {each[0] for each in gpu_host.bus.changes}
    assert not gpu_host.exists(f"{MACHINE_ROOTS}/{MACHINE}")
    # That pass had found the machine, so it may have written the settings after their removal.
    gpu_host.remove(nspawn_file(MACHINE))
    for _ in range(2):
        outcome = agent.reconcile()
        assert outcome.failures == ()
        assert "NoSuchMachine" in {each.reason for each in outcome.machines[0].conditions}
        assert not gpu_host.exists(nspawn_file(MACHINE))
        assert not gpu_host.exists(f"{MACHINE_ROOTS}/{MACHINE}")


def conditions(outcome: Outcome) -> dict[ConditionType, Condition]:
    return {each.type: each for each in outcome.machines[0].conditions}


def test_a_link_in_the_place_of_a_machines_root_is_named_and_nothing_is_written(gpu_host: Host) -> None:
    """The machine runs, and starts again, with the settings that it has."""
    running(gpu_host)
    root, elsewhere = f"{MACHINE_ROOTS}/{MACHINE}", "/srv/elsewhere"
    before = [gpu_host.read(path) for path in WRITTEN]
    gpu_host.make_directory(elsewhere)
    os.rmdir(f"{gpu_host.root}{root}")
    gpu_host.symlink(root, f"../../..{elsewhere}")
    gpu_host.gpu("0000:03:00.0", 2)
    agent = reconciler(gpu_host)
    for state in ("active", "activating"):
        units(gpu_host, state)
        outcome = prepare(MACHINE, agent)
        assert (outcome.failures, outcome.actions) == ((), ())
        message = conditions(outcome)[ConditionType.READY].message
        assert message.startswith(f"{root} is a symbolic link to ../../..{elsewhere}; replace the link")
    assert [gpu_host.read(path) for path in WRITTEN] == before
    assert gpu_host.entries(elsewhere) == ()
    assert gpu_host.read_link(root) == f"../../..{elsewhere}"
    assert gpu_host.bus.changes == []
    gpu_host.remove_file(root)
    gpu_host.make_directory(root)
    prepare(MACHINE, agent)
    assert b"BindReadOnly=/dev/nvidia2\n" in gpu_host.read(nspawn_file(MACHINE))


@pytest.mark.parametrize("directory", [MACHINE_ROOTS, "/run/systemd/nspawn"])
def test_settings_that_nspawn_no_longer_reads_are_named(gpu_host: Host, directory: str) -> None:
    """It reads one file only. That of the agent comes first."""
    path = f"{directory}/{MACHINE}.nspawn"
    gpu_host.file(path, "[Exec]\nEnvironment=PLACE=rack-7\n")
    agent = reconciler(gpu_host)
    assert path not in str(agent.preview()[0].all_problems()), "nspawn still reads it"
    for _ in range(2):
        outcome = agent.run_pass()
        (problem,) = (each for each in outcome.facts.all_problems() if path in each)
        assert problem.startswith(f"{path} has no effect, because systemd-nspawn reads {nspawn_file(MACHINE)} instead")
        assert f"machines.{MACHINE}.nspawn" in problem
    assert gpu_host.read_text(path) == "[Exec]\nEnvironment=PLACE=rack-7\n"
    assert ("systemctl", "start", "--no-block", UNITS[0]) in gpu_host.runner.calls


LOOKS = (("/sbin/ldconfig", "-p"),)
"""Programs that change nothing."""
NO_ANSWER = BusError("BindMountMachine: no answer in time")
NO_ANSWER.__cause__ = TimeoutError(110, "no answer in time")


@pytest.mark.parametrize(
    "answer",
    [
        BusAnswerError("org.freedesktop.DBus.Error.ServiceUnknown: Unit dbus-org.freedesktop.machine1 not found"),
        BusAnswerError("org.freedesktop.DBus.Error.NoReply: Message recipient disconnected from message bus"),
        BusAnswerError(f"org.freedesktop.machine1.NoSuchMachine: No machine '{MACHINE}' known"),
        NO_ANSWER,
    ],
    ids=["absent", "restarted", "another memory", "silent"],
)
def test_without_machined_a_machine_runs_on_and_its_gpu_waits(gpu_host: Host, answer: BusError) -> None:
    """PID 1 alone says whether it runs. Nothing that it has is bound again later."""
    running(gpu_host)
    gpu_host.gpu("0000:03:00.0", 2)
    gpu_host.runner.calls.clear()
    agent, bus, asked = reconciler(gpu_host), gpu_host.bus_caller, []

    def without_machined(
        service: str, path: str, method: str, signature: str, arguments: tuple[object, ...], timeout: float
    ) -> tuple[object, ...]:
        if service == MACHINED:
            asked.append((method.rpartition(".")[2], arguments[1]))
            raise answer
        return bus(service, path, method, signature, arguments, timeout)

    gpu_host.bus_caller = without_machined
    jobs = [*gpu_host.bus.mounts.jobs]
    for _ in range(2):
        outcome = agent.run_pass()
        assert str(answer) in str(outcome.failures)
        assert condition(outcome.machines[0], ConditionType.MACHINE_RUNNING) == (Status.TRUE, "Running")
        lacking = conditions(outcome)[ConditionType.DEVICES_ALLOWED]
        assert lacking.reason == "NotGiven"
        assert "/dev/nvidia2" in lacking.message
        assert "restart gpu-node --kubeconfig FILE" in lacking.message
    new = {"/dev/nvidia2", "/dev/dri/card3", "/dev/dri/renderD130"}
    assert {*asked} <= {("BindMountMachine", path) for path in new}
    gpu_host.bus_caller = bus
    agent.run_pass()
    assert sorted(str(each[2]) for each in gpu_host.bus.changes if each[0] == "BindMountMachine") == sorted(new)
    assert agent.run_pass().actions == ()
    assert [argv for argv in gpu_host.runner.calls if argv not in LOOKS] == [("systemctl", "daemon-reload")]
    assert gpu_host.bus.mounts.jobs == jobs


def test_while_pid_1_is_silent_a_machines_state_is_unknown_and_nothing_is_done(gpu_host: Host) -> None:
    """Only a node is left to be bound, which waits. Seven conditions once said that the machine was not running."""
    running(gpu_host)
    live = parse_live(gpu_host.read(live_file(MACHINE)))
    nodes = {path: number for path, number in live.nodes.items() if path != "/dev/nvidia1"}
    gpu_host.write(live_file(MACHINE), render_live(replace(live, nodes=nodes)))
    agent = reconciler(gpu_host)
    gpu_host.runner.calls.clear()
    gpu_host.bus.failing = BusError("no answer in time")
    outcome = agent.run_pass(by_hand=(MACHINE,))
    unknown = [each for each in outcome.machines[0].conditions if each.status is Status.UNKNOWN]
    assert {each.reason for each in unknown} == {"ObservationFailed"}
    assert {ConditionType.MACHINE_RUNNING, ConditionType.READY} < {each.type for each in unknown}
    assert conditions(outcome)[ConditionType.MACHINE_RUNNING].message == "no answer in time"
    assert not any("is not running" in each.message for each in outcome.machines[0].conditions)
    assert (outcome.actions, outcome.failures) == ((), ())
    assert gpu_host.bus.changes == []
    gpu_host.bus.failing = None
    assert [each.kind for each in agent.run_pass().actions] == ["change"]
    assert [(each[0], each[2]) for each in gpu_host.bus.changes] == [("BindMountMachine", "/dev/nvidia1")]
    assert [argv for argv in gpu_host.runner.calls if argv not in LOOKS] == []


PROC_GPUS, BOTH = "/proc/driver/nvidia/gpus", (FIRST, SECOND)
DEVICES = (ConditionType.DEVICES_PRESENT, "ObservationFailed")
LIBRARIES = (ConditionType.LIBRARIES_PRESENT, "OnlyStaged")


def fails(path: str, number: int, why: str) -> Callable[[Host], None]:
    return lambda host: host.failing.update({path: OSError(number, why, path)})


DENIED, SILENT = "Permission denied", "no answer within 5 s"


@pytest.mark.parametrize(
    ("look", "kind", "said"),
    [
        (lambda host: [host.remove_tree(f"{PROC_GPUS}/{each}") for each in BOTH], DEVICES, ", ".join(BOTH)),
        (lambda host: host.remove_tree("/proc/driver/nvidia"), DEVICES, ", ".join(BOTH)),
        (fails(PROC_GPUS, 13, DENIED), DEVICES, DENIED),
        (fails("/proc/driver/nvidia/capabilities", 13, DENIED), DEVICES, DENIED),
        # The GPU's firmware restarts.
        (fails(f"{PROC_GPUS}/{SECOND}/information", 110, SILENT), DEVICES, SILENT),
        (lambda host: setattr(host, "pci", ()), DEVICES, ", ".join(BOTH)),
        (lambda host: host.loader_cache("0 libs found in cache `/etc/ld.so.cache'\n"), LIBRARIES, ""),
        (lambda host: host.loader_cache(""), LIBRARIES, ""),
    ],
    ids=["empty", "missing", "refused", "no capabilities", "no answer", "no bus", "no libraries", "no list"],
)
def test_one_empty_or_failed_look_at_the_driver_withdraws_nothing(
    gpu_host: Host, look: Callable[[Host], object], kind: tuple[ConditionType, str], said: str
) -> None:
    """What else the host shows still says that the driver has the GPUs. After a failed look, nobody has to act."""
    running(gpu_host)
    handed = gpu_host.read(handoff_file(MACHINE))
    agent = reconciler(gpu_host)
    before = agent.reconcile().machines[0].conditions
    look(gpu_host)
    outcomes = [agent.reconcile() for _ in range(2)]
    for outcome in outcomes:
        (machine,) = outcome.machines
        assert (outcome.failures, outcome.actions, machine.lost) == ((), (), ())
        assert machine.startable, "with the settings that are on disk"
    found = conditions(outcomes[-1])[kind[0]]
    assert found.reason == kind[1]
    assert said in found.message
    if gpu_host.failing:
        gpu_host.failing.clear()
        after = agent.reconcile()
        assert after.actions == ()
        assert [each.status for each in after.machines[0].conditions] == [each.status for each in before]
    assert gpu_host.read(handoff_file(MACHINE)) == handed
    assert gpu_host.bus.changes == []


def test_a_driver_that_is_removed_from_the_host_is_withdrawn_with_its_module(gpu_host: Host) -> None:
    """First the package, then the module. The machine keeps the driver root for pods that still run."""
    running(gpu_host)
    (before,) = parse_handoff(gpu_host.read(handoff_file(MACHINE))).requests
    agent = reconciler(gpu_host)
    gpu_host.loader_cache("0 libs found in cache `/etc/ld.so.cache'\n")
    for library in Path(f"{gpu_host.root}/usr").rglob("lib*.so*"):
        library.unlink()
    assert agent.reconcile().actions == ()
    gpu_host.file("/proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n  8 sd\n")
    gpu_host.remove_tree("/proc/driver/nvidia")
    gpu_host.remove_file("/sys/module/nvidia/version")
    gpu_host.drm = ()
    for address in (FIRST, SECOND):
        gpu_host.rebind(address, "")
    outcome = agent.reconcile()
    assert outcome.failures == ()
    (after,) = parse_handoff(gpu_host.read(handoff_file(MACHINE))).requests
    assert (after.gpus, after.devices) == ((), ())
    assert (after.driver_root, after.files) == (before.driver_root, before.files)
    (properties,) = (each[3] for each in gpu_host.bus.changes if each[0] == "SetUnitProperties")
    assert "/dev/char/195:" not in str(properties)
    found = {kind: each.reason for kind, each in conditions(outcome).items()}
    assert found[ConditionType.DRIVER_LOADED] == "ModuleNotLoaded"
    assert found[ConditionType.DEVICES_PRESENT] == "GPUWithoutDriver"
    assert found[ConditionType.LIBRARIES_PRESENT] == "NotInstalled"
    assert agent.reconcile().actions == ()


@pytest.mark.parametrize("why", ["foreign", "full"])
def test_settings_that_could_not_be_updated_return_no_permission(gpu_host: Host, why: str) -> None:
    """After a daemon-reload by somebody else, PID 1 lists what the old drop-in permits."""
    running(gpu_host)
    if why == "foreign":
        gpu_host.write(nspawn_file(MACHINE), b"[Service]\nNice=5\n")
    else:
        gpu_host.full = ["/etc/"]
    reconciler(gpu_host, gpus=[FIRST]).reconcile()
    units(gpu_host, "active", device_allow=[("char-pts", "rw"), ("/dev/fuse", "rw"), *allowed(gpu_host)])
    gpu_host.unplug(FIRST)
    reconciler(gpu_host, gpus=[FIRST]).reconcile()
    first, second = (str(each[3]) for each in gpu_host.bus.changes)
    assert [f"/dev/char/195:{minor}'" in first for minor in range(2)] == [True, False]
    assert [f"/dev/char/195:{minor}'" in second for minor in range(2)] == [False, False]
    assert "/dev/fuse" in second, "somebody else has permitted this"


@pytest.mark.parametrize(
    ("unseen", "draining"),
    [(live_file(MACHINE), False), (live_file(MACHINE), True), (nspawn_file(MACHINE), False), ("unit", False)],
    ids=["record", "draining", "settings", "unit"],
)
def test_one_failed_look_at_a_running_machine_forgets_nothing(gpu_host: Host, unseen: str, draining: bool) -> None:
    """The handoff lists withdrawn nodes. A second one without them is not the one that the machine has answered.

    The settings have the permission of a GPU that is drained too: a daemon-reload would withdraw it otherwise.
    """
    running(gpu_host)
    if draining:
        gpu_host.symlink(f"/sys/bus/pci/devices/{SECOND}", "../../../devices/pci0000:00")
        assert record_detached(gpu_host, SECOND, draining=True)
    agent = reconciler(gpu_host, gpus="all" if draining else [FIRST])
    for _ in range(3):
        assert agent.reconcile().failures == ()
    handed, drop_in = gpu_host.read(handoff_file(MACHINE)), gpu_host.read(unit_drop_in(MACHINE))
    changes = [*gpu_host.bus.changes]
    assert "/dev/nvidia1" in parse_handoff(handed).withdrawn
    assert (b"DeviceAllow=/dev/char/195:1 rw\n" in drop_in) == draining
    gpu_host.failing[unseen] = OSError(5, "Input/output error", unseen)
    gpu_host.bus.failing = BusError("no answer in time") if unseen == "unit" else None
    outcome = agent.reconcile()
    assert (outcome.failures, outcome.actions) == ((), ())
    assert conditions(outcome)[ConditionType.DEVICES_ALLOWED].status is Status.UNKNOWN
    assert gpu_host.bus.changes == changes
    assert (gpu_host.read(handoff_file(MACHINE)), gpu_host.read(unit_drop_in(MACHINE))) == (handed, drop_in)
