"""Damaged state of our own is discarded, counted and logged once, and ends no pass."""

import errno
import json
import logging
import os
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from agent.cli.prepare import prepare
from agent.config.settings import Config
from agent.host.daemon.loop import EventLog
from agent.host.detach import granted_to
from agent.host.reconcile import Reconciler
from agent.host.state.gpus import observe_remembered
from agent.model.conditions import ConditionType, Status
from agent.model.errors import AgentError
from agent.model.facts import Remembered, parse_live, render_live
from agent.model.paths import (
    CONDITIONS,
    GPUS,
    MACHINES_STATE,
    MANIFESTS,
    OWNED,
    REMEMBERED_GPUS,
    REMOVED,
    TREES,
    granted_file,
    handed_roots_file,
    handoff_file,
    live_file,
    nspawn_file,
    unit_drop_in,
)
from agent.model.text import json_digest, sha256
from agent.system.trust import discarded
from tests.fakes.gpu_host import MACHINE, reconciler, units
from tests.fakes.host import Host
from tests.fakes.reports import condition
from tests.fakes.running import allowed, running

GPU = "0000:01:00.0"
RECORDS = (OWNED, CONDITIONS, live_file(MACHINE), granted_file(MACHINE), handed_roots_file(MACHINE))


@pytest.mark.parametrize(
    ("path", "content"),
    # The fault suite damages each record in hundreds of ways.
    [*((path, b"") for path in RECORDS), (OWNED, b'{"version": 99}'), (OWNED, b"[" * 3000)],
)
def test_a_damaged_record_is_counted_logged_and_recreated(
    gpu_host: Host, path: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    running(gpu_host)
    before = discarded().get(os.path.basename(path), 0)
    gpu_host.write(path, content)
    with caplog.at_level(logging.WARNING):
        outcome = reconciler(gpu_host).reconcile()
    assert outcome.failures == ()
    assert discarded()[os.path.basename(path)] > before
    assert any(os.path.basename(path) in each for each in caplog.messages)
    counted = discarded()
    after = reconciler(gpu_host).reconcile()
    assert after.failures == ()
    assert not after.facts.problems
    assert discarded() == counted


@pytest.mark.parametrize("path", [GPUS, granted_file(MACHINE)])
def test_damage_that_stays_is_logged_and_counted_once(
    gpu_host: Host, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is written there until a machine starts, or a GPU fails. The service makes a pass each minute."""
    running(gpu_host)
    units(gpu_host, "inactive", stopped_at=1)
    agent, log, name = reconciler(gpu_host), EventLog(), os.path.basename(path)
    for damage in (b"{", b"["):
        gpu_host.write(path, damage)
        before = discarded().get(name, 0)
        caplog.clear()
        for _ in range(3):
            log.outcome(agent.reconcile())
        assert discarded()[name] == before + 1
        assert len([each for each in caplog.messages if f"{name}: " in each]) == 1


@pytest.mark.parametrize("path", [OWNED, CONDITIONS, live_file(MACHINE), *REMEMBERED_GPUS])
def test_a_directory_in_a_records_place_is_moved_aside(gpu_host: Host, path: str) -> None:
    running(gpu_host)
    gpu_host.remove_file(path)
    gpu_host.write(f"{path}/content", b"")
    assert reconciler(gpu_host).reconcile().failures == ()
    assert gpu_host.read(path)
    # The record of GPUs is written as a part of the goal: a later pass removes what was in its place.
    place = REMOVED if path in REMEMBERED_GPUS else os.path.dirname(path)
    names = [name for name in gpu_host.entries(place) if place == REMOVED or ".damaged-" in name]
    assert len(names) == 1


@pytest.mark.parametrize(
    ("path", "content"), [(nspawn_file(MACHINE), b"\0" * 4096), (unit_drop_in(MACHINE), b"")], ids=["zeros", "empty"]
)
def test_settings_that_a_power_loss_emptied_are_written_again(gpu_host: Host, path: str, content: bytes) -> None:
    reconciler(gpu_host).run_pass()
    whole = gpu_host.read(path)
    gpu_host.write(path, content)
    (machine,) = reconciler(gpu_host).reconcile().machines
    assert gpu_host.read(path) == whole
    assert condition(machine, ConditionType.DEVICES_ALLOWED)[1] != "ForeignFile"


def test_an_unreadable_record_is_neither_damaged_nor_forgotten(gpu_host: Host) -> None:
    running(gpu_host)
    record = gpu_host.read(OWNED)
    before = discarded().get("owned.json", 0)
    gpu_host.failing[OWNED] = OSError(errno.EIO, "Input/output error", OWNED)
    gpu_host.gpu("0000:03:00.0", 2)
    outcome = reconciler(gpu_host).reconcile()
    assert "Input/output error" in str(outcome.failures)
    assert condition(outcome.machines[0], ConditionType.DEVICES_ALLOWED)[1] != "ForeignFile"
    gpu_host.failing.clear()
    assert gpu_host.read(OWNED) == record
    assert discarded().get("owned.json", 0) == before


@pytest.mark.parametrize("lost", ["damaged", "missing"])
def test_without_the_ownership_record_settings_are_known_by_their_first_line(gpu_host: Host, lost: str) -> None:
    """They may also differ from the goal by then: the driver's numbers may change at the boot after a power loss."""
    running(gpu_host)
    if lost == "damaged":
        gpu_host.write(OWNED, b"")
    else:
        gpu_host.remove_file(OWNED)
    gpu_host.gpu("0000:03:00.0", 2)
    outcome = reconciler(gpu_host).reconcile()
    assert outcome.failures == ()
    assert condition(outcome.machines[0], ConditionType.DEVICES_ALLOWED)[1] != "ForeignFile"
    for path in (nspawn_file(MACHINE), unit_drop_in(MACHINE)):
        assert json.loads(gpu_host.read(OWNED))["files"][path] == sha256(gpu_host.read(path))
    assert b"BindReadOnly=/dev/nvidia2\n" in gpu_host.read(nspawn_file(MACHINE))


@pytest.mark.parametrize("lost", ["unreadable", "damaged", "missing"])
def test_a_machine_that_is_no_longer_configured_is_found_without_the_ownership_record(
    gpu_host: Host, lost: str
) -> None:
    """It runs, and may open its GPUs. Once it has ended, its settings are removed."""
    running(gpu_host)
    gpu_host.make_directory("/var/lib/machines/new")
    gpu_host.bus.unit("systemd-nspawn@new.service", "inactive")
    agent = Reconciler(Config.validated({"machines": {"new": {"gpus": "count=1"}}}), gpu_host, gpu_host)
    if lost == "unreadable":
        gpu_host.failing[OWNED] = OSError(errno.EIO, "Input/output error", OWNED)
    elif lost == "damaged":
        gpu_host.write(OWNED, b"{")
    else:
        gpu_host.remove_file(OWNED)
    for _ in range(2):
        assert agent.reconcile().machines[0].gpus == ()
        facts, planned, _ = agent.preview()
        with pytest.raises(AgentError, match=f"cannot change machine {MACHINE}: it is no longer in the configuration"):
            granted_to(GPU, facts, planned, agent.config.machines)
    if lost == "unreadable":
        gpu_host.failing[MACHINES_STATE] = gpu_host.failing[OWNED]
        with pytest.raises(AgentError, match="which machines have settings of the agent is unknown"):
            agent.reconcile()
        gpu_host.failing.clear()
    units(gpu_host, "inactive", stopped_at=1)
    assert agent.reconcile().machines[0].gpus == (GPU,)
    assert not any(gpu_host.exists(path) for path in (nspawn_file(MACHINE), unit_drop_in(MACHINE)))
    assert [each.name for each in agent.preview()[0].machines] == ["new"]


Lose = Callable[[Host], None]


def removed(host: Host) -> None:
    host.remove_file(live_file(MACHINE))


def damaged(host: Host) -> None:
    host.write(live_file(MACHINE), b"{")


@pytest.mark.parametrize("lose", [removed, damaged])
def test_a_machine_without_a_note_is_known_by_its_started_settings(gpu_host: Host, lose: Lose) -> None:
    """prepare@ was killed, could not write its note, or the note was damaged: GPUs are still added and removed."""
    running(gpu_host)
    lose(gpu_host)
    units(gpu_host, "active", device_allow=[("char-pts", "rw"), *allowed(gpu_host), ("/dev/char/195:7", "rw")])
    gpu_host.gpu("0000:03:00.0", 2)
    outcome = reconciler(gpu_host).reconcile()
    assert outcome.failures == ()
    bound = {change[2]: change[4] for change in gpu_host.bus.changes if change[0] == "BindMountMachine"}
    assert bound["/dev/nvidia2"] is True
    assert not bound.keys() & {"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"}
    assert {"char-pts", "/dev/char/195:0", "/dev/char/195:2"} <= permitted(gpu_host)
    assert "/dev/char/195:7" not in permitted(gpu_host), "it is not granted"
    assert condition(outcome.machines[0], ConditionType.DEVICES_ALLOWED)[1] != "MachineRestartNeeded"


def permitted(host: Host) -> set[str]:
    """Return what the only change of a list permits."""
    (properties,) = (each[3] for each in host.bus.changes if each[0] == "SetUnitProperties")
    assert isinstance(properties, list)
    return {node for node, _ in properties[-1][1][1]}


def test_an_upgrade_that_compares_settings_differently_needs_no_restart(gpu_host: Host) -> None:
    """The digest in the note is of another form, but the machine has the same settings."""
    running(gpu_host)
    note = parse_live(gpu_host.read(live_file(MACHINE)))
    older = replace(note, fixed="0" * 64, withdrawn=("/dev/nvidia7",))
    gpu_host.write(live_file(MACHINE), render_live(older))
    (machine,) = reconciler(gpu_host).reconcile().machines
    assert condition(machine, ConditionType.DEVICES_ALLOWED)[1] != "MachineRestartNeeded"
    kept = parse_live(gpu_host.read(live_file(MACHINE)))
    assert (kept.owners, kept.withdrawn) == (note.owners, ("/dev/nvidia7",)), "the rest of the note still counts"
    (machine,) = reconciler(gpu_host, nspawn={"capability": "all"}).reconcile().machines
    assert condition(machine, ConditionType.DEVICES_ALLOWED) == (Status.FALSE, "MachineRestartNeeded")


def test_withdrawal_does_not_wait_for_that_restart(gpu_host: Host) -> None:
    """It happens whatever else has changed in the settings, and whether or not that is recorded."""
    running(gpu_host)
    removed(gpu_host)
    agent = reconciler(gpu_host, gpus=[GPU], nspawn={"capability": "all"})
    for _ in range(2):
        (machine,) = agent.reconcile().machines
        assert condition(machine, ConditionType.DEVICES_ALLOWED) == (Status.FALSE, "MachineRestartNeeded")
    assert "/dev/char/195:0" in permitted(gpu_host)
    assert "/dev/char/195:1" not in permitted(gpu_host)
    (machine,) = reconciler(gpu_host, gpus=[GPU]).reconcile().machines
    assert condition(machine, ConditionType.DEVICES_ALLOWED)[1] != "MachineRestartNeeded", "it has these settings"


LASTING = (
    *(OWNED, f"{MANIFESTS}/0.json", live_file(MACHINE), granted_file(MACHINE), handed_roots_file(MACHINE)),
    *REMEMBERED_GPUS,
)
"""Records that outlive an upgrade of the agent."""


def newer(host: Host) -> None:
    """Write the records as a later release might, with additional keys."""
    for path in LASTING:
        document = json.loads(host.read(path))
        document["unheard"] = {"of": 1}
        for file in document["files"] if path.startswith(MANIFESTS) else ():
            file["unheard"] = ""
        if path in REMEMBERED_GPUS:
            for gpu in document["content"]["gpus"]:
                gpu["unheard"] = ""
            document["content"]["unheard"] = ""
            document["digest"] = json_digest(document["content"])
        host.write(path, json.dumps(document).encode())


def test_unknown_keys_in_records_leave_a_running_machine_alone(gpu_host: Host) -> None:
    """The records lose only what this release lacks."""
    prepare(MACHINE, reconciler(gpu_host))
    device_allow = [("char-pts", "rw"), *allowed(gpu_host)]
    units(gpu_host, "active", device_allow=device_allow)
    assert reconciler(gpu_host).reconcile().failures == ()
    files = (nspawn_file(MACHINE), unit_drop_in(MACHINE), handoff_file(MACHINE))
    before = {path: (gpu_host.read(path), gpu_host.identity(path)) for path in files}
    remembered = observe_remembered(gpu_host)
    assert isinstance(remembered[0], Remembered)
    assert len(remembered[0].gpus) == 2
    for _ in range(2):
        newer(gpu_host)
        records = {path: gpu_host.read(path) for path in LASTING}
        outcome = reconciler(gpu_host).run_pass()
        assert (outcome.failures, outcome.facts.all_problems()) == ((), ())
        assert [path for path in LASTING if gpu_host.read(path) != records[path]] == [*REMEMBERED_GPUS]
        assert len(outcome.actions) == len(REMEMBERED_GPUS)
        assert reconciler(gpu_host).run_pass().actions == ()
        assert {path: (gpu_host.read(path), gpu_host.identity(path)) for path in files} == before
        assert observe_remembered(gpu_host) == remembered
    assert gpu_host.entries(TREES) == ("0",)
    assert gpu_host.bus.changes == []
    assert {*gpu_host.runner.calls} == {("systemctl", "daemon-reload"), ("/sbin/ldconfig", "-p")}
