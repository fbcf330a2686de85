"""Adjusts conditions by time and by the previous pass. Pure.

Ready may have been lost too often; a start of the Fabric Manager, or GPUs' registration with it, may take too long; and
what GPUs said of their fabric is remembered until they say something else.
"""

from collections.abc import Mapping, Sequence

from agent.model.conditions import Condition, ConditionType, Status, false, summarize
from agent.model.reasons import Reason
from agent.model.text import rfc3339

WINDOW = 600.0
"""Seconds for which a loss of Ready is remembered."""
LOSSES = 4
"""Losses within WINDOW after which Ready must settle. Fewer losses may come from manual repairs or planned restarts."""
SETTLING = 60.0
"""Seconds without a further loss until Ready is True again."""
STARTING_LIMIT = 300.0
"""Seconds that Fabric Manager may take to start. On eight GPUs with NVSwitch it needs less than one minute."""
TOO_LATE: Mapping[str, Reason] = {
    Reason.FABRIC_MANAGER_STARTING: Reason.FABRIC_MANAGER_STUCK,
    Reason.FABRIC_REGISTERING: Reason.FABRIC_NOT_REGISTERED,
}
"""Reasons that become others after STARTING_LIMIT."""


def with_time(new: Sequence[Condition], old: Sequence[Condition], now: float) -> tuple[Condition, ...]:
    """Return the new conditions, Ready last, adjusted with the help of `old`, the conditions of the previous pass."""
    before = {each.type: each for each in old}
    others = [_adjusted(each, before.get(each.type), now) for each in new if each.type is not ConditionType.READY]
    ready = next(each for each in new if each.type is ConditionType.READY)
    if others != [each for each in new if each.type is not ConditionType.READY]:
        ready = summarize(others)
    return (
        *(_remembering(each, before.get(each.type)) for each in others),
        settled(ready, before.get(ready.type), now),
    )


def settled(ready: Condition, before: Condition | None, now: float) -> Condition:
    """Return Ready as users see it: False at once, but True only after a delay if Ready was lost too often.

    Only False counts as a loss. Unknown does not, because Ready is Unknown until a machine has answered a new handoff.
    """
    losses = tuple(at for at in (before.losses if before else ()) if now - at <= WINDOW)
    good_since = before.good_since if before else 0.0
    if ready.status is Status.FALSE:
        return ready._replace(losses=(*losses, now) if good_since else losses, good_since=0.0)
    if ready.status is Status.TRUE:
        good_since = good_since or now
        if len(losses) >= LOSSES and now - good_since < SETTLING:
            ready = false(
                ConditionType.READY,
                Reason.SETTLING,
                f"all conditions are met, but Ready was lost {len(losses)} times within {WINDOW / 60:.0f} minutes: "
                f"it becomes True at {rfc3339(good_since + SETTLING)} unless something fails before then",
            )
    return ready._replace(losses=losses, good_since=good_since)


def _remembering(condition: Condition, before: Condition | None) -> Condition:
    """Return the condition with what GPUs said last, also if they could not be heard in this pass."""
    return condition._replace(said=before.said) if before and condition.said is None else condition


def _adjusted(condition: Condition, before: Condition | None, now: float) -> Condition:
    """Return the condition, but with the status False if the fabric has not been ready for too long."""
    if condition.reason not in TOO_LATE or before is None:
        return condition
    # `last_transition` is when the status became Unknown. The reason may have been another one at first: that time
    # counts too, and the limit is reached sooner.
    waited, late = (
        now - before.last_transition if before.reason == condition.reason else 0.0,
        TOO_LATE[condition.reason],
    )
    if before.reason != late and waited <= STARTING_LIMIT:
        return condition
    if late != Reason.FABRIC_MANAGER_STUCK:
        return false(condition.type, late, condition.message, condition.gpus)
    return false(
        condition.type,
        late,
        f"{condition.message}, and has not finished within {STARTING_LIMIT / 60:.0f} minutes; see "
        "the unit's log, then restart the unit: `unbounded-agent doctor` shows the commands",
    )
