"""What only time tells of conditions: Ready that comes and goes, and work in progress that never ends. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from agent.conditions import Condition, ConditionType, Status, false, summarize
from agent.judgement import rfc3339

WINDOW = 600.0
"""Seconds for which a loss of Ready is remembered."""
LOSSES = 4
"""Within WINDOW: from then on Ready has to settle. Fewer are a repair by hand and its tries, or planned restarts."""
SETTLING = 60.0
"""Seconds without a fault until Ready is True again."""
STARTING_LIMIT = 300.0
"""Seconds that the fabric manager may take to start: on eight GPUs with NVSwitch it needs less than one minute."""


def with_time(new: Sequence[Condition], old: Sequence[Condition], now: float) -> tuple[Condition, ...]:
    """The conditions of this moment, Ready last, as those of the pass before make them appear."""
    before = {each.type: each for each in old}
    others = [_overdue(each, before.get(each.type), now) for each in new if each.type is not ConditionType.READY]
    ready = next(each for each in new if each.type is ConditionType.READY)
    if others != [each for each in new if each.type is not ConditionType.READY]:
        ready = summarize(others)
    return (*others, settled(ready, before.get(ConditionType.READY), now))


def settled(ready: Condition, before: Condition | None, now: float) -> Condition:
    """Ready as it may be said: False is said at once; True waits where it was lost too often.

    Only faults (False) count: while a machine answers a new handoff Ready is Unknown, which says nothing against it.
    """
    # What is ahead of the clock was before somebody set it back; it would never get old.
    losses = tuple(at for at in (before.losses if before else ()) if now - WINDOW <= at <= now)
    good_since = before.good_since if before and before.good_since <= now else 0.0
    if ready.status is Status.FALSE:
        return replace(ready, losses=(*losses, now) if good_since else losses, good_since=0.0)
    if ready.status is Status.TRUE:
        good_since = good_since or now
        if len(losses) >= LOSSES and now - good_since < SETTLING:
            ready = false(
                ConditionType.READY,
                "Settling",
                f"all conditions are met, but it was lost {len(losses)} times within {WINDOW / 60:.0f} minutes: "
                f"it counts again from {rfc3339(good_since + SETTLING)} on, unless something fails until then",
            )
    return replace(ready, losses=losses, good_since=good_since)


def _overdue(condition: Condition, before: Condition | None, now: float) -> Condition:
    """A start in progress is no fault, one that lasts for ever is."""
    if condition.reason != "FabricManagerStarting" or before is None:
        return condition
    # Transitions are those of the status: time in which it was Unknown for another reason counts from the second pass.
    waited = now - before.last_transition if before.reason == condition.reason else 0.0
    if before.reason != "FabricManagerStuck" and waited <= STARTING_LIMIT:
        return condition
    return false(
        condition.type,
        "FabricManagerStuck",
        f"{condition.message} for more than {STARTING_LIMIT / 60:.0f} minutes; see its log with `journalctl -u`, and "
        "restart it",
    )
