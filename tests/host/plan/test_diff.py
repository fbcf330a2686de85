"""What a pass changes for a machine that must not get everything, and what it leaves to the next pass."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from agent.config.settings import Config
from agent.host.plan.diff import Difference, changes_left, diff, settings_pending, startable
from agent.host.plan.goal import plan
from agent.host.plan.live_devices import Acknowledged
from agent.host.state.records import MARK
from agent.model.facts import Absent, Broken, DeviceAllow, Facts, FileState, Unseen, VendorFacts
from agent.model.goal import (
    ChangeDevices,
    MachineGoal,
    RemoveDriverRoot,
    StageDriverRoot,
    WriteFile,
)
from agent.model.paths import granted_file, handoff_file, nspawn_file, unit_drop_in
from tests.fakes.facts import CONFIG, MACHINE, at_rest, facts, nvidia, running, staged, without_second_gpu

SECOND = DeviceAllow("/dev/char/195:1", "rw")
NOT_THERE = FileState(Absent(""), owned=False)
FOREIGN = FileState(b"[Exec]\nBoot=yes\n", owned=False)


def with_file(seen: Facts, path: str, state: FileState) -> Facts:
    return replace(seen, files={**seen.files, path: state})


def outdated(path: str) -> Callable[[Facts, MachineGoal], Facts]:
    return lambda seen, _: with_file(seen, path, FileState(MARK, owned=True))


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


def test_a_machine_without_facts_holds_up_no_other() -> None:
    seen = facts()
    other = facts(machine="other")
    both = replace(seen, machines=(*seen.machines, *other.machines), files={**seen.files, **other.files})
    config = Config.validated({"machines": {MACHINE: {}, "other": {}}})
    found = diff(plan(config, both), replace(both, machines=other.machines))
    assert found.faults.keys() == {MACHINE}
    assert nspawn_file("other") in written(found)


def with_machine(seen: Facts, **fields: object) -> Facts:
    return replace(seen, machines=(replace(seen.machines[0], **fields),))


@pytest.mark.parametrize(
    ("change", "kinds", "pending", "left"),
    [
        (lambda seen, _: seen, [], False, False),
        # A start would use the old settings, but the running machine gets nothing from them.
        (outdated(nspawn_file(MACHINE)), ["WriteFile"], True, False),
        (outdated(unit_drop_in(MACHINE)), ["WriteFile", "ReloadUnits"], True, False),
        (lambda seen, _: replace(seen, reload_pending=True), ["ReloadUnits"], True, False),
        # Somebody else changed one of the unit's files.
        (lambda seen, _: with_machine(seen, unit_needs_reload=True), ["ReloadUnits"], True, False),
        (lambda seen, _: with_file(seen, handoff_file(MACHINE), NOT_THERE), ["WriteFile"], False, True),
        (lambda seen, goal: with_machine(seen, live=replace(goal.live, nodes={})), ["ChangeDevices"], False, True),
    ],
)
def test_what_is_left_to_do_or_pending_for_a_start(
    change: Callable[[Facts, MachineGoal], Facts], kinds: list[str], pending: bool, left: bool
) -> None:
    seen, goal = at_rest(facts())
    seen = change(seen, goal)
    found = diff(plan(CONFIG, seen), seen)
    assert [type(action).__name__ for action in found.actions] == kinds
    assert (settings_pending(goal, found), changes_left(goal, found)) == (pending, left)
    other = replace(found, actions=tuple(changes(found)))
    assert not changes_left(replace(goal, name="other"), other), "the same for each machine by itself"


@pytest.mark.parametrize(
    ("bound", "published", "all_bound", "republished"),
    # Seconds since all nodes were bound again, and since the handoff was published.
    [(1.0, 60.0, True, True), (60.0, 1.0, True, False), (1.0, 60.0, False, False)],
)
def test_a_handoff_is_published_again_after_its_nodes_were_all_bound_again(
    bound: float, published: float, all_bound: bool, republished: bool
) -> None:
    """So that the machine half looks for them. The pass that bound them ended before it could do so."""
    seen, goal = at_rest(facts())
    nodes = goal.live.nodes if all_bound else dict(list(goal.live.nodes.items())[1:])
    live = replace(goal.live, rebound=goal.generation, nodes=nodes)
    seen = with_machine(seen, live=live, live_age=bound, granted_age=published)
    found = diff(plan(CONFIG, seen), seen, Acknowledged(missing_nodes=frozenset({MACHINE})))
    assert len(changes(found)) == (not all_bound)
    assert written(found) == ({granted_file(MACHINE), handoff_file(MACHINE)} if republished else set())
    # Only if the machine reports them as missing.
    assert not written(diff(plan(CONFIG, seen), seen))


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
