"""Even an unexpected error in one machine's work affects only that machine: the others continue."""

import logging
import time
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from msgspec.structs import replace

from agent.config.settings import Config
from agent.host.apply.steps import apply
from agent.host.plan.diff import diff
from agent.host.plan.goal import Plan, plan
from agent.host.reconcile import MachineOutcome, Reconciler
from agent.host.verify.answers import STALE_AFTER
from agent.model.conditions import ConditionType, Status
from agent.model.errors import BusError
from agent.model.facts import DeviceAllow, Facts, parse_live, render_live
from agent.model.goal import ChangeDevices, WriteFile, fault
from agent.model.handoff import Report, parse_handoff, render_report
from agent.model.paths import (
    HOST_NVIDIA,
    RELOAD_PENDING,
    REPORT_NAME,
    handed_roots_file,
    handoff_directory,
    handoff_file,
    live_file,
    report_directory,
    started_drop_in,
    started_nspawn,
)
from tests.fakes.facts import CONFIG, facts, without_second_gpu
from tests.fakes.gpu_host import MACHINE, reconciler, set_up, units
from tests.fakes.host import Host
from tests.fakes.running import running

BAD = "bad"
NONSENSE = cast(Any, object())
"""No observation returns such a value, whatever a machine has done to its files."""


def two(host: Host, **settings: object) -> Reconciler:
    host.bus.unit(f"systemd-nspawn@{BAD}.service", "inactive")
    host.make_directory(f"/var/lib/machines/{BAD}")
    machines = {MACHINE: settings, BAD: settings}
    return Reconciler(Config.validated({"machines": machines}), host, host)


def assert_only_bad_is_faulted(machines: tuple[MachineOutcome, ...], work: str) -> None:
    found = {each.name: each for each in machines}
    assert {each.type for each in found[BAD].conditions} == set(ConditionType)
    # GPUS_COMPLETE comes from the record of all machines' GPUs.
    own_conditions = [each for each in found[BAD].conditions if each.type is not ConditionType.GPUS_COMPLETE]
    for each in own_conditions:
        assert (each.status, each.reason) == (Status.UNKNOWN, "InternalError")
        assert each.message.startswith(f"cannot {work}: ")
    assert not {each.reason for each in found[MACHINE].conditions} & {"InternalError", "ObservationFailed"}


def test_an_error_in_observing_one_machine(gpu_host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """The machine does not change, the other gets its GPUs, and the log has the traceback once."""
    agent = two(gpu_host)
    gpu_host.failing[handed_roots_file(BAD)] = RecursionError("maximum recursion depth exceeded")
    with caplog.at_level(logging.ERROR, "agent"):
        for _ in range(2):
            outcome = agent.reconcile()
            assert outcome.failures == (
                f"machine {BAD}: cannot observe it: RecursionError: maximum recursion depth exceeded",
            )
            assert_only_bad_is_faulted(outcome.machines, "observe it")
    assert gpu_host.is_file(handoff_file(MACHINE))
    assert not gpu_host.exists(handoff_file(BAD))
    assert caplog.text.count("Traceback (most recent call last)") == 1
    gpu_host.failing.clear()
    assert agent.reconcile().failures == ()
    assert gpu_host.is_file(handoff_file(BAD))


def two_seen(**bad: object) -> Facts:
    """Return one sound machine, and one that runs without the second GPU, with these facts."""
    seen, left = facts(), plan(CONFIG, facts(without_second_gpu())).goal.machines[0].live
    fields = {"name": BAD, "root": f"/var/lib/machines/{BAD}", "unit_state": "active", "live": left, **bad}
    files = {path.replace("gpu-node", BAD): state for path, state in seen.files.items()}
    machines = (seen.machines[0], replace(seen.machines[0], **cast(Any, fields)))
    return replace(seen, machines=machines, files=seen.files | files)


def planned(seen: Facts) -> Plan:
    return plan(Config.validated({"machines": {"gpu-node": {}, BAD: {}}}), seen)


def test_an_error_in_the_plan_for_one_machine() -> None:
    found = planned(two_seen(live=NONSENSE))
    assert [machine.name for machine in found.goal.machines] == ["gpu-node"]
    assert found.held.keys() == found.faults.keys() == {BAD}
    assert found.held[BAD].startswith("cannot plan its settings: AttributeError: ")


def test_an_error_in_the_steps_for_one_machine() -> None:
    """It gets no part of its steps: its new devices, or a handoff that names them, would come without its settings.

    The other machine's steps are complete.
    """
    sound = two_seen()
    seen = without_handoff(sound, BAD)
    found = diff(planned(seen), seen)
    assert found.faults.keys() == {BAD}
    steps = diff(planned(sound), sound).actions
    its_own = [each for each in steps if BAD in f"{getattr(each, 'path', '')}{getattr(each, 'machine', '')}"]
    assert {type(each) for each in its_own} == {ChangeDevices, WriteFile}
    assert found.actions == tuple(each for each in steps if each not in its_own)


def test_an_error_in_the_steps_still_forbids_what_was_withdrawn(gpu_host: Host) -> None:
    """The machine is not informed, and another machine may have the GPU now. The first one gets nothing more."""
    running(gpu_host)
    agent = reconciler(gpu_host, gpus=["0000:01:00.0"])
    seen, wanted, _ = agent.preview()
    found = diff(wanted, without_handoff(seen))
    assert found.faults.keys() == {MACHINE}
    (change,) = (each for each in found.actions if isinstance(each, ChangeDevices))
    before, after = change.before, change.after
    assert set(before.allow) - set(after.allow) == {
        DeviceAllow("/dev/char/195:1", "rw"),
        DeviceAllow("/dev/char/226:2", "rw"),
        DeviceAllow("/dev/char/226:129", "rw"),
    }
    assert after.nodes == before.nodes, "nothing is bound, and what the machine still sees is not forgotten"
    assert gpu_host.bus.changes == []
    assert apply([change], gpu_host).failures == ()
    assert [each[0] for each in gpu_host.bus.changes] == ["SetUnitProperties"]
    again, wanted, _ = agent.preview()
    actions = diff(wanted, without_handoff(again)).actions
    assert not [each for each in actions if isinstance(each, ChangeDevices)], "once"


def without_handoff(seen: Facts, machine: str = MACHINE) -> Facts:
    """Return facts without that file, which no observation does."""
    return replace(seen, files={path: each for path, each in seen.files.items() if path != handoff_file(machine)})


class Unforeseen(bytes):
    """Content that raises an error as soon as its lines or its text are read."""

    def splitlines(self, keepends: bool = False) -> NoReturn:
        raise RecursionError("maximum recursion depth exceeded")

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> NoReturn:
        raise TypeError("unforeseen")


class HostOfBad(Host):
    """A host where the machine BAD was started with such content, or has reported such."""

    unforeseen = ""

    def read(self, path: str, limit: int = 4 << 20) -> bytes:
        content = super().read(path, limit)
        return Unforeseen(content) if path == self.unforeseen else content

    def read_untrusted(self, path: str, limit: int = 4 << 20) -> tuple[bytes, float]:
        content, changed = super().read_untrusted(path, limit)
        return (Unforeseen(content) if path == self.unforeseen else content), changed


@pytest.mark.parametrize(
    ("path", "work", "error"),
    [
        (
            started_nspawn(BAD),
            "determine which settings it started with",
            "RecursionError: maximum recursion depth exceeded",
        ),
        (f"{report_directory(BAD)}/{REPORT_NAME}", "read its report", "TypeError: unforeseen"),
    ],
)
def test_an_error_in_what_a_machine_was_started_with_or_reports(
    tmp_path: Path, path: str, work: str, error: str
) -> None:
    """This once ended the pass for all machines."""
    host = set_up(HostOfBad(tmp_path))
    assert isinstance(host, HostOfBad)
    host.unforeseen, agent = path, two(host)
    for each in (path, started_drop_in(BAD)):
        host.write(each, b"[Service]\n")
    host.bus.unit(f"systemd-nspawn@{BAD}.service", "active")
    outcome = agent.reconcile()
    assert outcome.failures == (f"machine {BAD}: cannot {work}: {error}",)
    assert_only_bad_is_faulted(outcome.machines, work)
    assert host.is_file(handoff_file(MACHINE))


def test_a_drop_in_that_is_not_text_is_not_an_error(gpu_host: Host) -> None:
    """The machine runs with unknown settings."""
    agent = reconciler(gpu_host)
    agent.reconcile()
    gpu_host.write(started_nspawn(MACHINE), b"")
    gpu_host.write(started_drop_in(MACHINE), b"DeviceAllow=/dev/char/\xff rw\n")
    units(gpu_host, "active")
    outcome = agent.reconcile()
    assert outcome.failures == ()
    assert "InternalError" not in {each.reason for each in outcome.machines[0].conditions}


def test_an_error_in_evaluating_one_machine(gpu_host: Host) -> None:
    agent = two(gpu_host)
    agent.reconcile()
    seen, wanted, difference = agent.preview()
    machines = tuple(
        replace(each, unit_state="active", live=NONSENSE) if each.name == BAD else each for each in seen.machines
    )
    seen = replace(seen, machines=machines)
    assert_only_bad_is_faulted(agent.evaluate(seen, wanted, difference), "evaluate its conditions")


def test_no_report_prevents_the_withdrawal_of_a_permission(gpu_host: Host) -> None:
    """A report that causes an error counts as broken."""
    running(gpu_host)
    agent = reconciler(gpu_host, gpus=["0000:01:00.0"])
    seen = agent.preview()[0]
    error = fault("read its report", TypeError("unforeseen"))
    seen = replace(seen, machines=(replace(seen.machines[0], report=error),))
    seen, wanted, found = agent.planned(seen)
    (change,) = (each for each in found.actions if isinstance(each, ChangeDevices))
    assert DeviceAllow("/dev/char/195:1", "rw") in change.before.allow
    assert DeviceAllow("/dev/char/195:1", "rw") not in change.after.allow
    (evaluated,) = agent.evaluate(seen, wanted, found)
    assert evaluated.fault
    assert evaluated.fault.why.startswith("cannot read its report: ")


def test_attack_nothing_prolongs_a_permission(gpu_host: Host) -> None:
    """The machine reports all the time, on a handoff that cannot be replaced, and keeps a node from being bound."""
    running(gpu_host)
    generation = parse_handoff(gpu_host.read(handoff_file(MACHINE))).generation
    gpu_host.write(f"{report_directory(MACHINE)}/{REPORT_NAME}", render_report(Report(generation, (), (), "", "", {})))
    agent = reconciler(gpu_host, gpus=["0000:01:00.0"])
    gpu_host.full = ["/var/"]
    gpu_host.bus.refused["/dev/nvidia-modeset"] = BusError("Failed to bind mount: Is a directory")
    unbound = parse_live(gpu_host.read(live_file(MACHINE)))
    gpu_host.write(live_file(MACHINE), render_live(replace(unbound, nodes={})))
    for _ in range(2):
        assert any("No space left on device" in each for each in agent.reconcile().failures)
    seen = agent.preview()[0]
    live = seen.machines[0].live
    assert live
    assert live.kept_since > 0
    for seconds, released in ((STALE_AFTER - 60, False), (STALE_AFTER + 1, True)):
        later = replace(live, kept_since=time.monotonic() - seconds)
        machine = replace(seen.machines[0], live=later, report_age=1.0)
        actions = agent.planned(replace(seen, machines=(machine,)))[-1].actions
        (change,) = (each for each in actions if isinstance(each, ChangeDevices))
        assert (DeviceAllow("/dev/char/195:1", "rw") in set(change.before.allow) - set(change.after.allow)) is released


def test_a_parent_of_driver_roots_that_cannot_be_made_ends_no_pass(gpu_host: Host) -> None:
    """On a full disk, devices that are no longer granted are still forbidden."""
    running(gpu_host)
    gpu_host.remove_tree(HOST_NVIDIA)
    gpu_host.full = ["/var/"]
    failures = reconciler(gpu_host, gpus=["0000:01:00.0"]).reconcile().failures
    assert f"cannot create {HOST_NVIDIA}: No space left on device" in failures
    (properties,) = (each[3] for each in gpu_host.bus.changes if each[0] == "SetUnitProperties")
    assert "/dev/char/195:1" not in str(properties)


def test_the_file_that_cannot_be_written_is_named(gpu_host: Host) -> None:
    """With /run full, the message named the settings in /etc, whose file system had room."""
    gpu_host.full = [RELOAD_PENDING]
    failures = reconciler(gpu_host).reconcile().failures
    (failure,) = (each for each in failures if "No space left" in each)
    assert failure.startswith("cannot write /etc/systemd/system/")
    assert failure.endswith(f": {RELOAD_PENDING}: No space left on device")


def test_a_directory_of_one_machine_that_cannot_be_made(gpu_host: Host) -> None:
    """This once ended the pass for all machines."""
    gpu_host.file(handoff_directory(BAD).removesuffix("/handoff"), "in the way")
    outcome = two(gpu_host).reconcile()
    assert f"cannot create {handoff_directory(BAD)}: Not a directory" in outcome.failures
    assert gpu_host.is_file(handoff_file(MACHINE))
    assert gpu_host.is_directory(HOST_NVIDIA)
