"""The preparation before each start of a machine."""

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from agent.cli.prepare import WAIT_LIMIT, prepare
from agent.model.conditions import Condition, ConditionType, Reason, Status
from agent.model.errors import AgentError, BusAnswerError, ConfigError
from agent.model.facts import parse_live
from agent.model.paths import (
    MACHINE_ROOTS,
    MACHINES_STATE,
    PASS_LOCK,
    joined_file,
    live_file,
    nspawn_file,
    report_directory,
)
from agent.system.systemd import SYSTEMD_MANAGER
from tests.fakes.clock import Clock
from tests.fakes.gpu_host import MACHINE, UNITS, reconciler, set_up, units
from tests.fakes.host import Host
from tests.fakes.reports import OPENED, report
from tests.fakes.running import allowed, running, started


def test_the_machine_gets_fresh_settings(gpu_host: Host) -> None:
    """Users of the host cannot enter root file systems: they would have the image's nodes and setuid programs."""
    machines = Path(gpu_host.full_path(MACHINE_ROOTS))
    machines.chmod(0o755)
    outcome = prepare(MACHINE, reconciler(gpu_host))
    assert gpu_host.is_directory(report_directory(MACHINE))
    assert parse_live(gpu_host.read(live_file(MACHINE))) == outcome.machines[0].start_settings
    assert machines.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="machine elsewhere is not configured"):
        prepare("elsewhere", reconciler(gpu_host))


def test_a_directory_that_cannot_be_closed_keeps_no_machine_from_starting(
    gpu_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(gpu_host.full_path(MACHINE_ROOTS)).chmod(0o755)
    agent, said = reconciler(gpu_host), list[str]()
    agent.progress = said.append

    real = os.chmod

    def chmod(path: str, mode: int) -> None:
        if path.endswith(MACHINE_ROOTS):
            raise OSError(errno.EROFS, "Read-only file system")
        real(path, mode)

    monkeypatch.setattr(os, "chmod", chmod)
    assert prepare(MACHINE, agent).machines[0].start_settings
    assert "Read-only file system; once that is corrected, run `chmod 700 /var/lib/machines`" in "".join(said)


def test_a_running_machine_keeps_its_report_and_what_it_was_started_with(gpu_host: Host) -> None:
    """`systemctl start` of a running machine starts prepare@ too."""
    kept = (live_file(MACHINE), f"{report_directory(MACHINE)}/report.json", joined_file(MACHINE))
    for path in kept:
        gpu_host.write(path, b"0123")
    units(gpu_host, "active")
    prepare(MACHINE, reconciler(gpu_host))
    assert [gpu_host.read(path) for path in kept if gpu_host.exists(path)] == [b"0123"] * 3


def test_a_start_that_replaces_a_stop_waits_until_the_machine_has_stopped(
    gpu_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_host.write(live_file(MACHINE), b"the last run's")
    units(gpu_host, "deactivating")
    monkeypatch.setattr("time.sleep", lambda seconds: units(gpu_host, "inactive", stopped_at=1))
    outcome = prepare(MACHINE, reconciler(gpu_host))
    assert parse_live(gpu_host.read(live_file(MACHINE))) == outcome.machines[0].start_settings


def test_a_start_waits_as_long_as_systemd_may_take_for_a_stop(gpu_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """TimeoutStopSec=160 counts for ExecStop=, if the machine half answered it, and again for systemd's own stop."""
    gpu_host.write(live_file(MACHINE), b"the last run's")
    units(gpu_host, "deactivating")
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 319:
            units(gpu_host, "inactive", stopped_at=1)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", sleep)
    outcome = prepare(MACHINE, reconciler(gpu_host))
    assert parse_live(gpu_host.read(live_file(MACHINE))) == outcome.machines[0].start_settings


@pytest.mark.parametrize("state", ["deactivating", "unseen"])
def test_a_machine_that_may_still_run_keeps_its_record(
    gpu_host: Host, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    gpu_host.write(live_file(MACHINE), b"the last run's")
    units(gpu_host, state)
    if state == "unseen":
        gpu_host.bus.failing = BusAnswerError("time limit")
    clock = iter(range(0, 10_000, 5))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    prepare(MACHINE, reconciler(gpu_host))
    assert gpu_host.exists(live_file(MACHINE))


def test_a_machine_that_is_stopped_while_its_start_waits_stays_stopped(gpu_host: Host) -> None:
    """systemd has no time at which it stopped, because its unit has not begun to start."""
    begin = ("systemctl", "start", "--no-block", UNITS[0])
    service = reconciler(gpu_host)
    service.run_pass()
    gpu_host.bus.jobs[UNITS[0]] = "start"
    prepare(MACHINE, reconciler(gpu_host))
    gpu_host.runner.calls.clear()
    waiting = service.run_pass().machines[0]
    assert waiting.pending
    assert {"NotStarted"} <= {each.reason for each in waiting.conditions}
    assert begin not in gpu_host.runner.calls, "a stop may have cancelled the start since the pass saw it"
    gpu_host.bus.jobs.clear()
    assert {"Stopped"} <= {each.reason for each in service.run_pass().machines[0].conditions}
    assert begin not in gpu_host.runner.calls
    service.run_pass(by_hand=(MACHINE,))
    assert begin in gpu_host.runner.calls


def test_an_earlier_machines_report_does_not_count(gpu_host: Host) -> None:
    """The unit may have failed to mount an empty report directory, and the new machine may be a different one."""
    agent = reconciler(gpu_host)
    agent.run_pass()
    units(gpu_host, "active")
    report(gpu_host, OPENED)
    assert not agent.reconcile().machines[0].pending
    units(gpu_host, "activating")
    prepare(MACHINE, agent)
    units(gpu_host, "active")
    outcome = agent.reconcile()
    assert outcome.machines[0].pending
    assert "NoReport" in {each.reason for each in outcome.machines[0].conditions}


def test_a_machine_that_is_replaced_while_a_pass_changes_its_devices(gpu_host: Host) -> None:
    """The note describes the new machine, which has everything by its settings: nothing is bound a second time."""
    starting: list[threading.Thread] = []
    call = gpu_host.bus.__call__

    def replaced(
        service: str, path: str, method: str, signature: str, arguments: tuple[object, ...], timeout: float
    ) -> tuple[object, ...]:
        if method == f"{SYSTEMD_MANAGER}.SetUnitProperties" and not starting:
            units(gpu_host, "activating")
            gpu_host.bus.refused["/dev/nvidia2"] = BusAnswerError("No machine 'gpu-node' known")
            starting.append(threading.Thread(target=prepare, args=(MACHINE, reconciler(gpu_host))))
            starting[0].start()
        return call(service, path, method, signature, arguments, timeout)

    running(gpu_host)
    gpu_host.gpu("0000:03:00.0", 2)
    gpu_host.bus_caller = replaced
    assert "No machine 'gpu-node' known" in str(reconciler(gpu_host).reconcile().failures)
    starting[0].join(60)
    gpu_host.bus.refused.clear()
    live = parse_live(gpu_host.read(live_file(MACHINE)))
    assert live.nodes["/dev/nvidia2"] == "195:2"
    started(gpu_host)
    units(gpu_host, "active", device_allow=[("char-pts", "rw"), *allowed(gpu_host)])
    gpu_host.bus.changes.clear()
    assert reconciler(gpu_host).reconcile().failures == ()
    assert gpu_host.bus.changes == []


@pytest.mark.parametrize("wait", [0, 240])
def test_a_driver_that_never_loads_delays_but_does_not_stop_the_machine(
    gpu_host: Host, clock: Clock, wait: int
) -> None:
    gpu_host.rebind("0000:02:00.0", "")
    clock.least = 240
    messages: list[str] = []
    agent = reconciler(gpu_host, driver_wait=wait)
    agent.progress = messages.append
    prepare(MACHINE, agent)
    assert ("waiting for the driver of GPU 0000:02:00.0, up to 240 s" in messages) is bool(wait)
    assert ("continuing without GPU 0000:02:00.0" in messages) is bool(wait)
    assert gpu_host.exists(live_file(MACHINE))


class AmongOtherPasses(Host):
    """A host whose clock only waiting moves, and where another pass takes 59 seconds whenever the lock is wanted."""

    now = 0.0

    def open_lock(self, path: str) -> int:
        self.end, self.other = self.now + 59, super().open_lock(path)
        fcntl.flock(self.other, fcntl.LOCK_EX)
        return super().open_lock(path)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.end:
            fcntl.flock(self.other, fcntl.LOCK_UN)


def test_waiting_ends_before_the_units_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command waits for the lock up to five times. systemd would kill it without a word in the middle of a pass."""
    tree = tmp_path / "host"
    tree.mkdir()
    host = AmongOtherPasses(tree)
    set_up(host)
    host.rebind("0000:02:00.0", "")
    monkeypatch.setattr("time.monotonic", lambda: host.now)
    monkeypatch.setattr("time.sleep", host.sleep)
    agent = reconciler(host, driver_wait=240)

    def progress(sentence: str) -> None:
        # Instead of 240 observations.
        host.now += 240 if sentence.startswith("waiting for the driver") else 0

    agent.progress = progress
    with pytest.raises(AgentError, match="another pass of unbounded-agent is still running"):
        prepare(MACHINE, agent)
    assert WAIT_LIMIT <= host.now < WAIT_LIMIT + 1


def test_a_full_disk_costs_no_settings(gpu_host: Host) -> None:
    """/etc may be on another disk. Driver roots of the last start are kept, and no note of it without a lock."""
    gpu_host.full.append(f"{MACHINES_STATE}/")
    prepare(MACHINE, reconciler(gpu_host))
    assert b"BindReadOnly=/dev/nvidia1\n" in gpu_host.read(nspawn_file(MACHINE))
    gpu_host.full.clear()
    gpu_host.write(live_file(MACHINE), b"0123")
    gpu_host.remove(PASS_LOCK)
    gpu_host.make_directory(PASS_LOCK)
    with pytest.raises(IsADirectoryError):
        prepare(MACHINE, reconciler(gpu_host))
    assert not gpu_host.exists(live_file(MACHINE))


class DuringAnotherPass(Host):
    """A host where another pass locks first and, having found the machine running, notes a change of its devices."""

    def __init__(self, tree: Path) -> None:
        super().__init__(tree)
        self.noted: list[bool] = []

    def open_lock(self, path: str) -> int:
        self.noted.append(self.exists(live_file(MACHINE)))
        if len(self.noted) == 1:
            self.write(live_file(MACHINE), b"0123")
        return super().open_lock(path)


def test_the_note_of_the_last_start_is_removed_whoever_has_the_lock(tmp_path: Path) -> None:
    tree = tmp_path / "host"
    tree.mkdir()
    host = DuringAnotherPass(tree)
    set_up(host)
    host.write(live_file(MACHINE), b"0123")
    prepare(MACHINE, reconciler(host))
    assert len(host.noted) > 2
    assert not any(host.noted)


def test_a_missed_gpu_that_left_while_the_machine_started_is_permitted(gpu_host: Host) -> None:
    """The record is from before the GPU left, the settings from after that. Nodes that are missed are bound again."""
    service = reconciler(gpu_host)
    service.run_pass()
    prepare(MACHINE, reconciler(gpu_host))
    units(gpu_host, "activating")
    gpu_host.unplug("0000:02:00.0")
    service.reconcile()
    started(gpu_host)
    permitted = [("char-pts", "rw"), *allowed(gpu_host)]
    gpu_host.gpu("0000:02:00.0", 1)
    units(gpu_host, "active", device_allow=permitted)
    service.reconcile()
    gpu_host.bus.changes.clear()
    report(gpu_host, Condition(ConditionType.DEVICES_ALLOWED, Status.FALSE, Reason.WRONG_NODE, "missing"))
    service.reconcile()
    (change,) = (each for each in gpu_host.bus.changes if each[0] == "SetUnitProperties")
    assert "/dev/char/195:1" in repr(change)
    assert "/dev/char/195:1" not in repr(permitted)
