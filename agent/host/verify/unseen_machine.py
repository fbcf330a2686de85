"""Adjusts the conditions of a machine if it is unknown whether the machine exists. Pure."""

from collections.abc import Sequence

from agent.model.conditions import Condition, ConditionType, Status, unknown
from agent.model.facts import MachineFacts, Unseen
from agent.model.reasons import Reason


def with_unseen_machine(conditions: Sequence[Condition], machine: MachineFacts) -> tuple[Condition, ...]:
    """Return the conditions. MachineRunning and Ready become Unknown if it is unknown whether the machine exists.

    That is so for users who may not read /var/lib/machines. But a machine counts as existing if its unit runs,
    or has stopped or failed to start since the host booted.
    """
    if not isinstance(machine.root, Unseen) or machine.has_run or not machine.ended:
        return tuple(conditions)
    why = f"whether machine {machine.name} exists is unknown: {machine.root.why}"
    changed = (ConditionType.MACHINE_RUNNING, ConditionType.READY)
    return tuple(
        unknown(each.type, Reason.OBSERVATION_FAILED, why)
        if each.type in changed and each.status is not Status.UNKNOWN
        else each
        for each in conditions
    )
