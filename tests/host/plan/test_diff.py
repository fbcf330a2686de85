"""What a pass changes for a machine that must not get everything, and what it leaves to the next pass."""

import pytest
from msgspec.structs import replace

from agent.config.settings import Config
from agent.host.plan.diff import Difference, changes_left, diff, settings_pending, startable
from agent.host.plan.goal import plan
from agent.host.plan.live_devices import Acknowledged
from agent.host.state.records import MARK
from agent.model.facts import Absent, Broken, DeviceAllow, Facts, FileState, Unseen, VendorFacts
from agent.model.goal import ChangeDevices, ReloadUnits, RemoveDriverRoot, RemoveFile, StageDriverRoot, WriteFile
from agent.model.paths import granted_file, handoff_file, nspawn_file, unit_drop_in
from tests.fakes.facts import CONFIG, MACHINE, at_rest, facts, nvidia, running, staged, without_second_gpu

SECOND = DeviceAllow("/dev/char/195:1", "rw")
FOREIGN = FileState(b"[Exec]\nBoot=yes\n", owned=False)


def with_file(seen: Facts, path: str, state: FileState) -> Facts:
    return replace(seen, files={**seen.files, path: state})


def changes(difference: Difference) -> list[ChangeDevices]:
    return [action for action in difference.actions if isinstance(action, ChangeDevices)]


def written(difference: Difference) -> set[str]:
    return {action.path for action in difference.actions if isinstance(action, WriteFile)}


@pytest.mark.parametrize("path", [nspawn_file(MACHINE), unit_drop_in(MACHINE)])
@pytest.mark.parametrize("state", [FOREIGN, FileState(Broken("a directory"), owned=True)])
def test_a_machine_whose_settings_are_refused_still_loses_withdrawn_devices(path: str, state: FileState) -> None:
    """Another machine may get the GPU next."""
    before = plan(CONFIG, facts()).goal.machines[0].live
    seen = with_file(running(facts(without_second_gpu()), before), path, state)
    found = diff(plan(CONFIG, seen), seen)
    assert MACHINE in found.refused
    (change,) = changes(found)
    assert set(before.allow) - set(change.after.allow) >= {SECOND}
    assert set(change.after.allow) < set(before.allow)
    assert change.after.nodes == before.nodes
    assert not written(found) & {nspawn_file(MACHINE), unit_drop_in(MACHINE), handoff_file(MACHINE)}


@pytest.mark.parametrize(
    ("had", "has", "state"),
    [
        (without_second_gpu(), nvidia(), FOREIGN),
        # The next pass may read the settings: until then, the machine keeps what it has.
        (nvidia(), without_second_gpu(), FileState(Unseen("Input/output error"), owned=True)),
    ],
)
def test_a_machine_whose_settings_are_refused_gets_nothing_new(
    had: VendorFacts, has: VendorFacts, state: FileState
) -> None:
    before = plan(CONFIG, facts(had)).goal.machines[0].live
    seen = with_file(running(facts(has), before), nspawn_file(MACHINE), state)
    found = diff(plan(CONFIG, seen), seen)
    assert found.refused.keys() == {MACHINE}
    assert changes(found) == []
    assert not written(found) & {unit_drop_in(MACHINE), handoff_file(MACHINE)}


class UnreadableFiles(dict[str, FileState]):
    """Files of which the drop-in can only be looked up `looks` times."""

    looks = 0

    def __getitem__(self, path: str) -> FileState:
        self.looks -= path == unit_drop_in(MACHINE)
        if self.looks < 0:
            raise OverflowError("unexpected")
        return super().__getitem__(path)


@pytest.mark.parametrize("looks", [0, 1])
def test_a_machine_with_a_fault_gets_no_part_of_its_steps(looks: int) -> None:
    """Otherwise its new devices, or a handoff that names them, would come without its settings."""
    before = plan(CONFIG, facts(without_second_gpu())).goal.machines[0].live
    seen = running(facts(), before)
    planned = plan(CONFIG, seen)
    files = UnreadableFiles(seen.files)
    files.looks = looks
    found = diff(planned, replace(seen, files=files))
    assert found.faults.keys() == {MACHINE}
    assert changes(found) == []
    assert not written(found) & {
        granted_file(MACHINE), handoff_file(MACHINE), nspawn_file(MACHINE), unit_drop_in(MACHINE)
    }  # fmt: skip


def test_a_machine_without_facts_holds_up_no_other() -> None:
    seen = facts()
    other = facts(machine="other")
    both = replace(seen, machines=(*seen.machines, *other.machines), files={**seen.files, **other.files})
    config = Config.validated({"machines": {MACHINE: {}, "other": {}}})
    found = diff(plan(config, both), replace(both, machines=other.machines))
    assert found.faults.keys() == {MACHINE}
    assert nspawn_file("other") in written(found)


def test_at_rest_nothing_is_left_to_do() -> None:
    seen, goal = at_rest(facts())
    found = diff(plan(CONFIG, seen), seen)
    assert found.actions == ()
    assert not settings_pending(goal, found)
    assert not changes_left(goal, found)


@pytest.mark.parametrize("path", [nspawn_file(MACHINE), unit_drop_in(MACHINE)])
def test_changed_settings_are_pending(path: str) -> None:
    """A start would use the old ones."""
    seen, goal = at_rest(facts())
    seen = with_file(seen, path, FileState(MARK, owned=True))
    found = diff(plan(CONFIG, seen), seen)
    assert path in written(found)
    assert settings_pending(goal, found)
    assert not changes_left(goal, found), "the running machine gets nothing from them"


def test_settings_that_systemd_has_not_read_are_pending() -> None:
    seen, goal = at_rest(facts())
    found = diff(plan(CONFIG, seen), replace(seen, reload_pending=True))
    assert found.actions == (ReloadUnits(),)
    assert settings_pending(goal, found)
    assert not changes_left(goal, found)


def test_a_handoff_that_is_not_written_yet_is_left_to_do() -> None:
    seen, goal = at_rest(facts())
    found = diff(plan(CONFIG, seen), with_file(seen, handoff_file(MACHINE), FileState(Absent(""), owned=False)))
    assert written(found) == {handoff_file(MACHINE)}
    assert changes_left(goal, found)
    assert not settings_pending(goal, found)


def test_devices_that_are_not_given_yet_are_left_to_do() -> None:
    seen, goal = at_rest(facts())
    (machine,) = seen.machines
    lacking = replace(machine, live=replace(goal.live, nodes={}))
    found = diff(plan(CONFIG, seen), replace(seen, machines=(lacking,)))
    assert [change.machine for change in changes(found)] == [MACHINE]
    assert changes_left(goal, found)
    assert not changes_left(replace(goal, name="other"), replace(found, actions=tuple(changes(found))))


@pytest.mark.parametrize(
    ("bound", "published", "republished"),
    # Seconds since all nodes were bound again, and since the handoff was published.
    [(1.0, 60.0, True), (60.0, 1.0, False)],
)
def test_a_handoff_is_published_again_after_its_nodes_were_bound_again(
    bound: float, published: float, republished: bool
) -> None:
    """So that the machine half looks for them. The pass that bound them ended before it could do so."""
    seen, goal = at_rest(facts())
    live = replace(goal.live, rebound=goal.generation)
    machine = replace(seen.machines[0], live=live, live_age=bound, granted_age=published)
    seen = replace(seen, machines=(machine,))
    found = diff(plan(CONFIG, seen), seen, Acknowledged(missing_nodes=frozenset({MACHINE})))
    assert changes(found) == []
    assert written(found) == ({granted_file(MACHINE), handoff_file(MACHINE)} if republished else set())
    # Only if the machine reports them as missing.
    assert diff(plan(CONFIG, seen), seen).actions == ()


def test_nodes_that_could_not_all_be_bound_again_are_not_announced() -> None:
    seen, goal = at_rest(facts())
    some = dict(list(goal.live.nodes.items())[1:])
    live = replace(goal.live, rebound=goal.generation, nodes=some)
    machine = replace(seen.machines[0], live=live, live_age=1.0, granted_age=60.0)
    seen = replace(seen, machines=(machine,))
    found = diff(plan(CONFIG, seen), seen, Acknowledged(missing_nodes=frozenset({MACHINE})))
    assert len(changes(found)) == 1
    assert written(found) == set()


@pytest.mark.parametrize("path", [nspawn_file(MACHINE), unit_drop_in(MACHINE)])
def test_a_machine_starts_only_with_both_of_its_files(path: str) -> None:
    seen, _ = at_rest(facts())
    machine = seen.machines[0]
    assert startable(machine, seen)
    for content in (Absent("not there"), Unseen("Input/output error"), b"[Exec]\n"):
        assert not startable(machine, with_file(seen, path, FileState(content, owned=True)))
    files = {key: state for key, state in seen.files.items() if key != path}
    assert not startable(machine, replace(seen, files=files))
    assert startable(machine, with_file(seen, path, FileState(MARK + b" of an earlier goal", owned=True)))
    assert not startable(machine, replace(seen, reload_pending=True))
    assert not startable(replace(machine, unit_needs_reload=True), seen)


def test_a_removal_is_read_by_systemd_in_the_same_pass() -> None:
    """Later passes do not look at the unit of a machine whose drop-in is gone. A new handoff must not delay that."""
    seen, _ = at_rest(facts())
    seen = with_file(seen, unit_drop_in("old"), FileState(MARK, owned=True))
    seen = with_file(seen, handoff_file(MACHINE), FileState(Absent(""), owned=False))
    actions = diff(plan(CONFIG, seen), seen).actions
    assert RemoveFile(unit_drop_in("old")) in actions
    assert ReloadUnits() in actions


def test_a_machine_that_needs_a_reload_to_start_gets_it_before_the_driver_is_staged() -> None:
    """Staging takes long."""
    seen = facts(nvidia())
    kinds = [type(action).__name__ for action in diff(plan(CONFIG, seen), seen).actions]
    assert kinds.index("ReloadUnits") < kinds.index("StageDriverRoot")


def test_a_unit_that_systemd_reads_no_more_is_read_again() -> None:
    """Somebody else changed one of its files."""
    seen, _ = at_rest(facts())
    changed = replace(seen, machines=(replace(seen.machines[0], unit_needs_reload=True),))
    assert diff(plan(CONFIG, changed), changed).actions == (ReloadUnits(),)


def test_a_driver_that_waits_for_its_module_is_staged_last_and_once() -> None:
    """The machine uses the loaded module's driver, and its handoff must not wait."""
    vendor = nvidia()
    assert vendor.driver is not None
    newer = replace(vendor.driver, user_space=replace(vendor.driver.user_space, version="580.1"))
    seen, _ = at_rest(facts(vendor))
    upgraded = replace(seen, vendors=(replace(vendor, driver=newer),))
    upgraded = with_file(upgraded, handoff_file(MACHINE), FileState(Absent(""), owned=False))
    *_, handoff, staging = diff(plan(CONFIG, upgraded), upgraded).actions
    assert isinstance(handoff, WriteFile)
    assert isinstance(staging, StageDriverRoot)
    assert staging.root.version == "580.1"
    done = staged(staging.root, upgraded)
    left = diff(plan(CONFIG, done), done).actions
    assert [type(action) for action in left] == [WriteFile]


def test_an_unused_driver_root_goes_first_only_if_another_one_needs_its_space() -> None:
    seen, goal = at_rest(facts())
    (root,) = seen.staged
    with_unused = staged(replace(root, index=7, version="1.0"), seen)
    unwritten = with_file(with_unused, handoff_file(MACHINE), FileState(Absent(""), owned=False))
    kinds = [type(action) for action in diff(plan(CONFIG, unwritten), unwritten).actions]
    assert kinds == [WriteFile, RemoveDriverRoot], "no machine waits for the removal"
    without = replace(unwritten, staged=tuple(each for each in unwritten.staged if each.index == 7))
    kinds = [type(action) for action in diff(plan(CONFIG, without), without).actions]
    assert kinds.index(RemoveDriverRoot) < kinds.index(StageDriverRoot) < len(kinds) - 1
    assert goal.grants[0].driver_root is not None


def test_times_of_files_that_are_as_staged_are_recorded_last() -> None:
    seen, _ = at_rest(facts())
    found = diff(plan(CONFIG, seen), replace(seen, time_records={"/var/lib/unbounded-agent/times": b"new"}))
    assert found.actions == (WriteFile("/var/lib/unbounded-agent/times", b"new"),)
