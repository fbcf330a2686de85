"""Plans driver roots: which to record as named by handoffs, and which to replace or remove. Pure."""

from collections.abc import Mapping

from msgspec.structs import replace

from agent.host.state.records import HANDED, Handed
from agent.model.facts import Absent, Broken, Facts, Granted, MachineFacts, Unseen
from agent.model.goal import Action, Fault, Goal, MachineGoal, RemoveDriverRoot, RemoveStaleStaging, WriteFile
from agent.model.paths import STAGING, handed_roots_file


def named_roots(machine: MachineFacts) -> Mapping[str, int] | None:
    """Return the indices of the driver roots that the machine's handoff names, by vendor; None if they are unknown."""
    if isinstance(machine.granted, Granted):
        return machine.granted.driver_roots
    return {} if isinstance(machine.granted, Absent) else None


def record_handed(goal: MachineGoal, machine: MachineFacts) -> list[Action]:
    """Return the step that records the roots of the current and the new handoff, unless they are recorded already.

    The step must precede the new handoff. The roots of the current handoff are recorded too, because running containers
    still use them.
    """
    recorded = machine.handed_roots
    if not isinstance(recorded, tuple):
        # Only the machine's start creates the record: a record that is created later would lack roots that running
        # containers use.
        return []
    new = {root.index for grant in goal.grants if (root := grant.driver_root)}
    handed = {*recorded, *(named_roots(machine) or {}).values(), *new}
    if handed == set(recorded):
        return []
    return [WriteFile(handed_roots_file(goal.name), HANDED.render(Handed(tuple(sorted(handed)))))]


def without_plain(facts: Facts) -> Facts:
    """Return the facts without the plain directories that mounts replace now, so that the plan stages them again."""
    if not replaceable(facts):
        return facts
    return replace(facts, staged=tuple(root for root in facts.staged if root.index not in facts.plain_roots))


def replaceable(facts: Facts) -> bool:
    """Return whether there are driver roots that are plain directories, and that mounts can replace now.

    All of this must be true: the last attempt to mount did not fail; no machine runs (machines may be starting);
    everything relevant was observed; and the host has the drivers' files, from which the roots are staged again: of the
    root's version, or of the loaded kernel module's.
    """
    if not facts.plain_roots or facts.mounting_failed or facts.staged_unseen:
        return False
    for each in facts.machines:
        running = not each.ended and each.unit_state != "activating"
        if running or isinstance(each.root, Fault) or named_roots(each) is None:
            return False
    if not all(isinstance(vendor.devices, tuple | Absent) for vendor in facts.vendors):
        return False
    drivers = {vendor.vendor: vendor.driver for vendor in facts.vendors}
    for root in (each for each in facts.staged if each.index in facts.plain_roots):
        driver = drivers.get(root.vendor)
        if driver is None or not isinstance(driver.user_space.files, tuple):
            return False
        version = driver.user_space.version
        if not isinstance(version, str) or version not in (root.version, driver.module_version):
            return False
    return True


def collect(goal: Goal, facts: Facts) -> list[Action]:
    """Return the steps that remove leftovers, and unneeded roots: none if something relevant was not observed."""
    staging = any(root not in facts.staged for root in (*goal.driver_roots, *goal.waiting_roots))
    # If a root is to be staged, staging itself removes the leftovers in STAGING. Leftovers of removals, in REMOVED, are
    # removed before that: they may fill the disk.
    leftovers = tuple(path for path in facts.stale_staging if not (staging and path.startswith(f"{STAGING}/")))
    actions: list[Action] = [RemoveStaleStaging(leftovers)] if leftovers else []
    used = _used_roots(goal, facts)
    if used is None:
        return actions
    complete = {root.index: f"{root.vendor} driver {root.version}" for root in facts.staged}
    on_disk = {**complete, **dict.fromkeys(facts.corrupt_roots, "incomplete")}
    return actions + [RemoveDriverRoot(index, on_disk[index]) for index in sorted(on_disk.keys() - used)]


def _used_roots(goal: Goal, facts: Facts) -> set[int] | None:
    """Return the indices of the roots that must stay; None if not all are known."""
    used = {root.index for root in (*goal.driver_roots, *goal.waiting_roots)}
    for machine in facts.machines:
        # A container that restarts in place needs the paths with which it was created. So, until the machine stops, the
        # roots stay that its handoffs have named since its start.
        named, handed = named_roots(machine), () if machine.ended else machine.handed_roots
        if named is None or not isinstance(handed, tuple):
            return None
        used |= {*named.values(), *handed}
    for vendor in facts.vendors:
        if not isinstance(vendor.devices, tuple | Absent):
            return None
        if vendor.driver is None:
            continue
        versions = (vendor.driver.module_version, vendor.driver.user_space.version)
        unclear = any(isinstance(version, Unseen | Broken) for version in versions)
        if unclear or not isinstance(vendor.driver.user_space.files, tuple):
            return None
        # Even if no machine uses them, the newest roots stay with the versions of the loaded module and of the host's
        # files.
        for version in versions:
            same = [root.index for root in facts.staged if (root.vendor, root.version) == (vendor.vendor, version)]
            used.update(sorted(same)[-1:])
    return used
