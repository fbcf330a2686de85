"""Adjusts the conditions of a machine of which nobody knows whether it exists. Pure."""

from collections.abc import Sequence

from agent.model.conditions import Condition, ConditionType, Status, unknown
from agent.model.facts import MachineFacts, Unseen
from agent.model.reasons import Reason

NOT_RUNNING = ("inactive", "failed")
"""States that the unit has too if there is no machine of this name."""


def with_unseen_machine(conditions: Sequence[Condition], machine: MachineFacts) -> tuple[Condition, ...]:
    """Return the conditions, MachineRunning and Ready Unknown if the caller may not see whether the machine exists.

    A machine that runs, or has run since the host booted, exists.
    """
    if not isinstance(machine.root, Unseen) or machine.has_run or machine.unit_state not in NOT_RUNNING:
        return tuple(conditions)
    why = f"whether machine {machine.name} exists is unknown: {machine.root.why}"
    changed = (ConditionType.MACHINE_RUNNING, ConditionType.READY)
    return tuple(
        unknown(each.type, Reason.OBSERVATION_FAILED, why)
        if each.type in changed and each.status is not Status.UNKNOWN
        else each
        for each in conditions
    )
