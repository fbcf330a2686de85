"""Plans driver roots: which to publish, which to record as named by handoffs, and which to remove. Pure.

Roots that are no longer used are removed. Roots that are plain directories are replaced by mounts, if that is possible.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from agent.host.state.records import render_handed
from agent.model.facts import Absent, Broken, Driver, Facts, MachineFacts, StagedRoot, Unseen
from agent.model.goal import (
    Action,
    Fault,
    Goal,
    MachineGoal,
    ProtectDriverRoots,
    PublishDriverRoot,
    RemoveDriverRoot,
    RemoveStaleStaging,
    WriteFile,
)
from agent.model.paths import STAGING, handed_roots_file


def named_roots(facts: Facts, machine: str) -> dict[str, int] | None:
    """Return the indices of the driver roots that the machine's handoff names, by vendor.

    The result is empty if the machine has no handoff, and None if the indices are unknown.
    """
    granted = next((each.granted for each in facts.machines if each.name == machine), Absent("no such machine"))
    if isinstance(granted, Absent):
        return {}
    return None if isinstance(granted, Broken | Unseen) else {**granted.driver_roots}


def record_handed(goal: MachineGoal, facts: Facts) -> list[Action]:
    """Return the step that records the roots of the current and the new handoff, unless they are recorded already.

    The step must precede the new handoff. The roots of the current handoff are recorded too, because running containers
    still use them.
    """
    machine = next(each for each in facts.machines if each.name == goal.name)
    recorded = machine.handed_roots
    if not isinstance(recorded, tuple):
        # Only the machine's start creates the record: a record that is created later would lack roots that running
        # containers use.
        return []
    new = {root.index for grant in goal.grants if (root := grant.driver_root)}
    handed = {*recorded, *(named_roots(facts, goal.name) or {}).values(), *new}
    if handed == set(recorded):
        return []
    return [WriteFile(handed_roots_file(goal.name), render_handed(handed))]


def publish(goal: Goal, facts: Facts, unused: Iterable[Action]) -> tuple[list[Action], list[Action]]:
    """Return the steps that publish roots that machines do not see yet.

    There are two lists: one for roots that the goal's handoffs name, and one for other roots. Roots that a step in
    `unused` removes are not published.
    """
    removed = {action.index for action in unused if isinstance(action, RemoveDriverRoot)}
    hidden = [root for root in facts.staged if root.hidden and root.index not in removed]
    return (
        [PublishDriverRoot(root) for root in hidden if root in goal.driver_roots],
        [PublishDriverRoot(root) for root in hidden if root not in goal.driver_roots],
    )


def without_plain(facts: Facts) -> Facts:
    """Return the facts without the plain directories that `protect` replaces, so that the plan stages them again."""
    if not _replaceable(facts):
        return facts
    return replace(facts, staged=tuple(root for root in facts.staged if root.index not in facts.plain_roots))


def protect(facts: Facts) -> list[Action]:
    """Return the step that replaces plain directories with mounts, if mounts can replace them now."""
    return [ProtectDriverRoots(facts.plain_roots)] if _replaceable(facts) else []


def _replaceable(facts: Facts) -> bool:
    """Return whether there are plain directories that mounts can replace now.

    All of this must be true: the last attempt to mount did not fail; no machine runs (machines may be starting);
    everything relevant was observed; and the host has the drivers' files, from which the roots are staged again.
    """
    if not facts.plain_roots or facts.mounting_failed or facts.staged_unseen:
        return False
    for each in facts.machines:
        running = not each.ended and each.unit_state != "activating"
        if running or isinstance(each.root, Fault) or named_roots(facts, each.name) is None:
            return False
    seen = all(isinstance(vendor.devices, tuple | Absent) for vendor in facts.vendors)
    return seen and all(_on_host(root, facts) for root in facts.staged if root.index in facts.plain_roots)


def _on_host(root: StagedRoot, facts: Facts) -> bool:
    """Return whether the host has files that can replace those in the root.

    They can if their version is that of the root, or that of the loaded kernel module.
    """
    driver = next((each.driver for each in facts.vendors if each.vendor == root.vendor), None)
    if driver is None or not isinstance(driver.user_space.files, tuple):
        return False
    version = driver.user_space.version
    return isinstance(version, str) and version in (root.version, driver.module_version)


def collect(goal: Goal, facts: Facts) -> list[Action]:
    """Return the steps that remove leftovers, and roots that nothing needs.

    Roots that a machine uses stay, and so do those for the host's loaded module and installed files (`_host_roots`). A
    container that restarts in place needs the paths with which it was created. So, if a handoff to a running machine
    has named a root since the machine's start, the root stays until the machine stops. No root is removed if something
    relevant could not be observed (fail static).
    """
    staging = any(root not in facts.staged for root in (*goal.driver_roots, *goal.waiting_roots))
    # If a root is to be staged, staging itself removes the leftovers in STAGING. Leftovers of removals, in REMOVED, are
    # removed before that: they may fill the disk.
    leftovers = tuple(path for path in facts.stale_staging if not (staging and path.startswith(f"{STAGING}/")))
    actions: list[Action] = [RemoveStaleStaging(leftovers)] if leftovers else []
    used = _used_roots(goal, facts)
    if used is None:
        return actions
    complete = {root.index: f"{root.vendor} driver {root.version}" for root in facts.staged}
    corrupt = dict.fromkeys(facts.corrupt_roots, "incomplete")
    on_disk = {**complete, **corrupt}
    return actions + [RemoveDriverRoot(index, on_disk[index]) for index in sorted(on_disk.keys() - used)]


def _used_roots(goal: Goal, facts: Facts) -> set[int] | None:
    """Return the indices of the roots that must stay; None if not all are known."""
    used = {root.index for root in (*goal.driver_roots, *goal.waiting_roots)}
    for machine in facts.machines:
        machine_roots = _used_by(machine, facts)
        if machine_roots is None:
            return None
        used |= machine_roots
    for vendor in facts.vendors:
        if not isinstance(vendor.devices, tuple | Absent):
            return None
        if vendor.driver is not None:
            newest = _host_roots(vendor.vendor, vendor.driver, facts.staged)
            if newest is None:
                return None
            used |= newest
    return used


def _used_by(machine: MachineFacts, facts: Facts) -> set[int] | None:
    """Return the indices of the roots that a machine uses; None if unknown."""
    named = named_roots(facts, machine.name)
    if named is None:
        return None
    if machine.ended:
        return set(named.values())
    if not isinstance(machine.handed_roots, tuple):
        return None
    return {*named.values(), *machine.handed_roots}


def _host_roots(vendor: str, driver: Driver, staged: tuple[StagedRoot, ...]) -> set[int] | None:
    """Return the indices of the roots that stay even if no machine uses them.

    These are the newest root with the loaded module's version, and the newest root with the host files' version.
    Returns None if a version or the files are unknown.
    """
    versions = (driver.module_version, driver.user_space.version)
    unclear = any(isinstance(version, Unseen | Broken) for version in versions)
    if unclear or not isinstance(driver.user_space.files, tuple):
        return None
    roots = [root for root in staged if root.vendor == vendor]
    return {
        max(root.index for root in roots if root.version == each.version) for each in roots if each.version in versions
    }
