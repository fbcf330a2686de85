"""The conditions of one machine: what is said of its settings, devices and driver root."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings
from agent.host.verify.answers import STALE_AFTER
from agent.host.verify.readiness import Case, expected_gpus
from agent.host.verify.readiness import conditions as conditions_of
from agent.model.conditions import Condition, ConditionType, Reason, Status, false, true
from agent.model.device import DeviceKind
from agent.model.facts import (
    Absent,
    Broken,
    Facts,
    Gpu,
    LiveSettings,
    MachineFacts,
    MountSource,
    Seen,
    Unseen,
    VendorFacts,
)
from agent.model.goal import MachineGoal
from agent.model.handoff import OTHER_DEVICES, Report
from agent.model.paths import driver_root, mount_unit
from tests.fakes.facts import CONFIG, MACHINE, at_rest, evaluated, facts, node, nvidia
from tests.fakes.node_settings import node_settings
from tests.fakes.reports import IN_MACHINE

KINDS = (ConditionType.DEVICES_ALLOWED, *IN_MACHINE)
NOT_PERMITTED = false(ConditionType.DEVICES_ALLOWED, Reason.NOT_PERMITTED, "x")


def configured(**settings: Any) -> Config:  # noqa: ANN401
    return Config.validated({"machines": {MACHINE: settings}})


def report(goal: MachineGoal, *conditions: Condition) -> Report:
    """Return a report on the goal's handoff that has these conditions, and the others as True."""
    changed = {each.type: each for each in conditions}
    all_of_them = tuple(changed.get(kind) or true(kind, Reason.VERIFIED, "") for kind in KINDS)
    return Report(goal.generation, all_of_them, agent_version="1.0.0")


def conditions(
    seen: Facts,
    goal: MachineGoal,
    config: Config | None = None,
    found: Report | Absent | Broken | Unseen | None = None,
    refused: str | Unseen = "",
) -> dict[ConditionType, tuple[Status, str, str]]:
    """Return status, reason and message by type."""
    settings = (config or configured()).machines[MACHINE]
    said = evaluated(settings, goal, seen, report(goal) if found is None else found, refused)
    return {each.type: (each.status, each.reason, each.message) for each in said}


def changed(seen: Facts, **machine: Any) -> Facts:  # noqa: ANN401
    return replace(seen, machines=(replace(seen.machines[0], **machine),))


def test_at_rest_the_machine_is_ready() -> None:
    seen, goal = at_rest(facts())
    found = conditions(seen, goal)
    assert {kind: each[0] for kind, each in found.items() if each[0] is not Status.TRUE} == {}
    assert found[ConditionType.READY][1] == Reason.ALL_CONDITIONS_TRUE
    assert found[ConditionType.DRIVER_ROOT_STAGED][1] == Reason.STAGED
    assert found[ConditionType.MACHINE_RUNNING][1] == Reason.RUNNING


def held(machine: MachineFacts, why: str) -> list[Condition]:
    """Return the conditions of a machine in `Plan.held`, but for GPUsComplete, which comes from the GPUs' record."""
    found = conditions_of(Case(CONFIG.machines[MACHINE], machine, facts(), held=why))
    return [each for each in found if each.type is not ConditionType.GPUS_COMPLETE]


ROOT = "/var/lib/machines/gpu-node"


@pytest.mark.parametrize(
    ("root", "missing"),
    [(Absent("not there"), True), (Broken("a link"), True), (ROOT, False), (Unseen("permission denied"), False)],
)
def test_a_machine_that_is_held_is_unknown_and_one_without_a_root_missing(root: Seen[str], missing: bool) -> None:
    """False, for Ready and for MachineRunning: nothing more has to be observed."""
    found = {each.type: each for each in held(MachineFacts("active", name=MACHINE, root=root), "why")}
    assert set(found) == set(ConditionType) - {ConditionType.GPUS_COMPLETE}
    false_ones = {kind for kind, each in found.items() if each.status is Status.FALSE}
    assert false_ones == ({ConditionType.MACHINE_RUNNING, ConditionType.READY} if missing else set())
    reason = Reason.NO_SUCH_MACHINE if missing else Reason.OBSERVATION_FAILED
    assert {each.reason for each in found.values()} == {reason}
    assert {each.message.removeprefix("DriverLoaded: ") for each in found.values()} == {"why"}


SECOND = "/dev/char/195:1"
RESTART = (Status.FALSE, Reason.MACHINE_RESTART_NEEDED, f"unbounded-agent restart {MACHINE}")


@pytest.mark.parametrize(
    ("change", "refused", "status", "reason", "said"),
    [
        # The machine runs without what other settings say, whatever it reports.
        (lambda live: {"live": None}, "", *RESTART),
        (lambda live: {"live": replace(live, fixed="0" * 64)}, "", *RESTART),
        (
            lambda live: {"live": None, "live_unseen": "live.json: Input/output error"},
            *("", Status.UNKNOWN, Reason.OBSERVATION_FAILED, "live.json: Input/output error"),
        ),
        (
            lambda live: {"live": replace(live, nodes={**live.nodes, "/dev/nvidia1": "195:7"})},
            *("", Status.FALSE, Reason.NOT_GIVEN, "could not give /dev/nvidia1 "),
        ),
        (
            lambda live: {"live": replace(live, allow=tuple(each for each in live.allow if each.node != SECOND))},
            *("", Status.FALSE, Reason.NOT_GIVEN, f"could not give {SECOND} rw "),
        ),
        (lambda _: {}, "another program's file", Status.FALSE, Reason.FOREIGN_FILE, "another program's file"),
        (lambda _: {}, Unseen("I/O error"), Status.UNKNOWN, Reason.OBSERVATION_FAILED, "I/O error"),
        # What the machine says counts if the host finds no fault.
        (lambda _: {}, "", Status.FALSE, Reason.NOT_PERMITTED, "machine says: x"),
    ],
)
def test_what_a_machine_lacks_is_named(
    change: Callable[[LiveSettings], dict[str, Any]], refused: str | Unseen, status: Status, reason: Reason, said: str
) -> None:
    seen, goal = at_rest(facts())
    seen = changed(seen, **change(goal.live))
    found = conditions(seen, goal, found=report(goal, NOT_PERMITTED), refused=refused)[ConditionType.DEVICES_ALLOWED]
    assert found[:2] == (status, reason)
    assert said in found[2]


@pytest.mark.parametrize(
    ("found", "age", "reason"),
    [
        (Absent("no report"), 0.0, Reason.NO_REPORT),
        (Broken("not JSON"), 0.0, Reason.BAD_REPORT),
        (Unseen("Input/output error"), 0.0, Reason.OBSERVATION_FAILED),
        (None, STALE_AFTER + 1, Reason.REPORT_STALE),
    ],
)
def test_without_a_current_report_nothing_in_the_machine_is_known(
    found: Absent | Broken | Unseen | None, age: float, reason: Reason
) -> None:
    seen, goal = at_rest(facts())
    evaluated = conditions(changed(seen, report_age=age, live_age=age, granted_age=age), goal, found=found)
    kinds = {kind for kind in KINDS if evaluated[kind][1] != Reason.NOT_APPLICABLE}
    assert {evaluated[kind][:2] for kind in kinds} == {(Status.UNKNOWN, reason)}
    assert evaluated[ConditionType.READY][:2] == (Status.UNKNOWN, reason)


def test_no_report_counts_on_another_handoff_or_of_a_machine_that_does_not_run() -> None:
    seen, goal = at_rest(facts())
    evaluated = conditions(seen, goal, found=report(goal)._replace(generation="f" * 64))
    assert evaluated[ConditionType.CDI_SPEC_CURRENT][:2] == (Status.UNKNOWN, Reason.HANDOFF_PENDING)
    evaluated = conditions(changed(seen, unit_state="failed"), goal)
    assert evaluated[ConditionType.CDI_SPEC_CURRENT][:2] == (Status.UNKNOWN, Reason.MACHINE_NOT_RUNNING)
    assert evaluated[ConditionType.MACHINE_RUNNING][:2] == (Status.FALSE, Reason.NOT_RUNNING)


def granting(goal: MachineGoal, **fields: Any) -> MachineGoal:  # noqa: ANN401
    (grant,) = (each for each in goal.grants if each.gpus)
    return replace(goal, grants=(replace(grant, **fields),))


def hidden(seen: Facts, goal: MachineGoal) -> tuple[Facts, MachineGoal]:
    root = replace(seen.staged[0], hidden=True)
    return replace(seen, staged=(root,)), granting(goal, driver_root=root)


def with_nouveau(*_: object) -> tuple[Facts, MachineGoal]:
    vendor = nvidia()
    return at_rest(facts(replace(vendor, gpus=tuple(replace(gpu, driver="nouveau") for gpu in vendor.gpus))))


@pytest.mark.parametrize(
    ("change", "status", "reason", "said"),
    [
        (
            lambda seen, goal: (replace(seen, staged=(), staged_problems=("no space",)), goal),
            *(Status.FALSE, Reason.NOT_STAGED, "; no space"),
        ),
        (
            lambda seen, goal: (replace(seen, plain_roots=(0,)), goal),
            *(Status.TRUE, Reason.PLAIN_COPY, "driver root 0 is a plain directory"),
        ),
        (hidden, Status.FALSE, Reason.NOT_MOUNTED, mount_unit(driver_root(0))),
        # It gets no GPU, but says why: that is no missing driver.
        (with_nouveau, Status.FALSE, Reason.NOTHING_TO_STAGE, "see DevicesPresent"),
        (
            lambda seen, goal: (seen, granting(goal, driver_files=False, driver_root=None)),
            *(Status.TRUE, Reason.NOT_APPLICABLE, ""),
        ),
        (
            lambda seen, goal: (seen, granting(goal, driver_root=None)),
            *(Status.FALSE, Reason.NOTHING_TO_STAGE, "see LibrariesPresent"),
        ),
        (
            lambda seen, goal: (seen, granting(goal, driver_root=None, waiting_root=seen.staged[0])),
            *(Status.FALSE, Reason.NOTHING_FITS, "kernel module is not loaded yet"),
        ),
    ],
)
def test_each_fault_of_a_driver_root_is_told(
    change: Callable[[Facts, MachineGoal], tuple[Facts, MachineGoal]], status: Status, reason: Reason, said: str
) -> None:
    found = conditions(*change(*at_rest(facts())))[ConditionType.DRIVER_ROOT_STAGED]
    assert found[:2] == (status, reason)
    assert said in found[2]


KVM = VendorFacts(OTHER_DEVICES, devices=(node("/dev/kvm", DeviceKind.KVM, 10, 232),))
FAULTY = false(ConditionType.CDI_SPEC_CURRENT, Reason.SPEC_REFUSED, "x")


@pytest.mark.parametrize(
    ("settings", "vendors", "relayed"),
    [
        ({"devices": ["kvm"]}, (KVM,), {ConditionType.DEVICES_ALLOWED}),
        ({"extra_mounts": [{"source": "/srv/models", "target": "/srv/models"}]}, (), {ConditionType.DEVICES_ALLOWED}),
        ({"cdi_modes": ["management"], "devices": ["kvm"]}, (), {ConditionType.CDI_SPEC_CURRENT}),
    ],
)
def test_a_machine_without_gpus_says_what_its_other_devices_and_mounts_lack(
    settings: dict[str, Any], vendors: tuple[VendorFacts, ...], relayed: set[ConditionType]
) -> None:
    config = configured(**settings)
    seen = replace(facts(), vendors=(VendorFacts("nvidia"), *vendors))
    seen = replace(seen, mount_sources={"/srv/models": MountSource("/srv/models", ("/srv", "/srv/models"))})
    seen, goal = at_rest(seen, config)
    evaluated = conditions(seen, goal, config, report(goal, NOT_PERMITTED, FAULTY))
    assert {kind for kind, each in evaluated.items() if each[0] is Status.FALSE} == relayed
    restarted = changed(seen, live=replace(goal.live, fixed="0" * 64))
    _, reason, _ = conditions(restarted, goal, config, report(goal))[ConditionType.DEVICES_ALLOWED]
    assert (reason == Reason.MACHINE_RESTART_NEEDED) is (ConditionType.DEVICES_ALLOWED in relayed)


def test_missing_devices_and_mounts_are_remarked_and_ready_stays() -> None:
    """A mount whose source appears after the machine has started awaits its next start."""
    mounts = [{"source": f"/srv/{name}", "target": f"/{name}"} for name in ("gone", "late")]
    config, later = configured(devices=["kvm"], extra_mounts=mounts), "; mounted at the machine's next start: /late"
    there = {"/srv/late": MountSource("/srv/late", ("/srv", "/srv/late"))}
    seen, goal = at_rest(replace(facts(), vendors=(nvidia(), VendorFacts(OTHER_DEVICES)), mount_sources=there), config)
    started = changed(seen, live=replace(goal.live, mounts=()))
    for now, waits in ((seen, False), (started, True), (changed(started, unit_state="inactive"), False)):
        evaluated = conditions(now, goal, config)
        status, _, message = evaluated[ConditionType.DEVICES_PRESENT]
        assert status is Status.TRUE
        assert "; requested but missing: " in message
        assert "kvm" in message
        assert "/srv/gone for /gone" in message
        assert (later in message) is waits
    assert conditions(started, goal, config)[ConditionType.READY][0] is Status.TRUE


@pytest.mark.parametrize(("key", "kind"), [
    ("validation_markers", ConditionType.VALIDATION_MARKERS_SET),
    ("node_condition", ConditionType.NODE_CONDITION_SET),
])  # fmt: skip
def test_what_is_not_configured_does_not_apply(key: str, kind: ConditionType) -> None:
    failed = false(kind, Reason.FAILED, "x")
    for wanted in (False, True):
        config = configured(**{key: wanted})
        seen, goal = at_rest(facts(), config)
        expected = (Status.FALSE, Reason.FAILED) if wanted else (Status.TRUE, Reason.NOT_APPLICABLE)
        assert conditions(seen, goal, config, report(goal, failed))[kind][:2] == expected


def test_the_driver_of_one_vendor_costs_only_its_gpus() -> None:
    """The machine was not ready, although all GPUs of the other vendor served pods."""
    amd = VendorFacts("amd", (Gpu("0000:41:00.0", "amd", ""),), ())
    config = configured(gpus=["0000:01:00.0", "0000:02:00.0", "0000:41:00.0"])
    seen, goal = at_rest(replace(facts(), vendors=(nvidia(), amd)), config)
    found = conditions(seen, goal, config)
    assert found[ConditionType.DRIVER_LOADED][:2] == (Status.FALSE, Reason.MODULE_NOT_LOADED)
    assert found[ConditionType.READY][:2] == (Status.TRUE, Reason.SOME_GPUS_UNUSABLE)
    vendor = nvidia()
    assert vendor.driver
    unloaded = replace(vendor, driver=replace(vendor.driver, module_version=Absent("not loaded")))
    alone = conditions(replace(seen, vendors=(unloaded, amd)), goal, config)
    assert alone[ConditionType.READY][:2] == (Status.FALSE, Reason.MODULE_NOT_LOADED)


@pytest.mark.parametrize(
    ("state", "age", "shown"), [("active", 0.0, True), ("active", STALE_AFTER + 1, False), ("inactive", 0.0, False)]
)
def test_only_the_current_report_of_a_machine_that_runs_says_what_is_strange_in_it(
    state: str, age: float, shown: bool
) -> None:
    """Conditions that this release does not know, and files of a node that differ. The status stays."""
    config = Config(machines={MACHINE: MachineSettings(node=node_settings())})
    seen, goal = at_rest(facts(), config)
    seen = changed(seen, unit_state=state, report_age=age)

    def running(found: Report | Absent) -> tuple[Status, str, str]:
        return conditions(seen, goal, config, found)[ConditionType.MACHINE_RUNNING]

    without = running(Absent("none"))
    assert running(Report("", ())) == without
    status, reason, message = running(Report("", (), unknown_conditions=("NewCheck=False (Failed)",)))
    assert (status, reason) == without[:2]
    assert ("machine says: NewCheck=False (Failed), which this release does not know" in message) == shown
    status, reason, message = running(Report("", (), changed_files=("/etc/a",)))
    assert (status, reason) == (without[0], Reason.NODE_FILES_CHANGED if shown else without[1])
    assert ("/etc/a" in message) == shown


@pytest.mark.parametrize(
    ("wanted", "count"), [("all", 2), ("count=3", 3), ("count=0", 0), ([], 0), (["0000:01:00.0", "GPU-1", "GPU-2"], 3)]
)
def test_the_settings_say_how_many_gpus_a_machine_should_have(wanted: str | list[str], count: int) -> None:
    assert expected_gpus(wanted, ("0000:01:00.0", "0000:02:00.0")) == count
