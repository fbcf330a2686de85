"""Which driver roots machines were handed, and which of those on disk nothing uses any more. Pure."""

from agent.actions import Action, ClearRemains, RemoveDriverRoot, WriteFile
from agent.facts import Absent, Broken, Driver, Facts, MachineFacts, StagedRoot, Unseen
from agent.goal import Goal, MachineGoal
from agent.manifest import render_handed
from agent.paths import handed_roots_file

ENDED = ("inactive", "failed")
"""ActiveState of a machine in which no process runs."""


def named_roots(facts: Facts, machine: str) -> dict[str, int] | None:
    """By vendor: the index that the machine's present handoff names. None when that cannot be told."""
    granted = next((each.granted for each in facts.machines if each.name == machine), Absent("no such machine"))
    if isinstance(granted, Absent):
        return {}
    return None if isinstance(granted, Broken | Unseen) else {**granted.driver_roots}


def record_handed(goal: MachineGoal, facts: Facts) -> list[Action]:
    """Before a handoff is replaced: containers that run go on with what the one before named."""
    machine = next(each for each in facts.machines if each.name == goal.name)
    recorded = machine.handed_roots
    if not isinstance(recorded, tuple):
        # Made at the machine's start alone: what ran before a record was begun is not known.
        return []
    new = {root.index for grant in goal.grants if (root := grant.driver_root)}
    handed = {*recorded, *(named_roots(facts, goal.name) or {}).values(), *new}
    if handed == set(recorded):
        return []
    return [WriteFile(handed_roots_file(goal.name), render_handed(handed))]


def collect(goal: Goal, facts: Facts) -> list[Action]:
    """Takes away what no machine was handed since its start, and what fits neither the host's module nor its files.

    A container that is restarted in place asks for the paths that it was made with, so that a driver root stays as long
    as a machine runs that was ever handed it. Nothing goes while something of this could not be seen (fail static).
    """
    staging = any(root not in facts.staged for root in (*goal.driver_roots, *goal.waiting_roots))
    # What a new staging clears by itself is left to it.
    remains = () if staging else facts.staging_remains
    actions: list[Action] = [ClearRemains(remains)] if remains else []
    used = _used(goal, facts)
    if used is None:
        return actions
    known = {root.index: f"{root.vendor} driver {root.version}" for root in facts.staged}
    spoiled = dict.fromkeys(facts.spoiled_roots, "spoiled or half made")
    on_disk = {**known, **spoiled}
    return actions + [RemoveDriverRoot(index, on_disk[index]) for index in sorted(on_disk.keys() - used)]


def _used(goal: Goal, facts: Facts) -> set[int] | None:
    """Indices that must stay; None when not all can be told."""
    used = {root.index for root in (*goal.driver_roots, *goal.waiting_roots)}
    for machine in facts.machines:
        of_machine = _used_by(machine, facts)
        if of_machine is None:
            return None
        used |= of_machine
    for vendor in facts.vendors:
        if not isinstance(vendor.devices, tuple | Absent):
            return None
        if vendor.driver is not None:
            newest = _of_the_host(vendor.vendor, vendor.driver, facts.staged)
            if newest is None:
                return None
            used |= newest
    return used


def _used_by(machine: MachineFacts, facts: Facts) -> set[int] | None:
    named = named_roots(facts, machine.name)
    if named is None:
        return None
    if machine.unit_state in ENDED:
        return set(named.values())
    if not isinstance(machine.handed_roots, tuple):
        return None
    return {*named.values(), *machine.handed_roots}


def _of_the_host(vendor: str, driver: Driver, staged: tuple[StagedRoot, ...]) -> set[int] | None:
    """The newest of the module's version and of the files' version, also while no machine has a GPU."""
    versions = (driver.module_version, driver.library_version)
    if any(isinstance(version, Unseen | Broken) for version in versions) or not isinstance(driver.files, tuple):
        return None
    ours = [root for root in staged if root.vendor == vendor]
    return {
        max(root.index for root in ours if root.version == each.version) for each in ours if each.version in versions
    }
