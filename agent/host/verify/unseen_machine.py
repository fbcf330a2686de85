"""Adjusts the conditions of a machine if it is unknown whether the machine exists. Pure."""

from collections.abc import Sequence

from agent.model.conditions import Condition, ConditionType, Status, unknown
from agent.model.facts import MachineFacts, Unseen
from agent.model.reasons import Reason


def with_unseen_machine(conditions: Sequence[Condition], machine: MachineFacts) -> tuple[Condition, ...]:
    """Return the conditions. MachineRunning and Ready become Unknown if it is unknown whether the machine exists.

    That is so for users who may not read /var/lib/machines. But a machine exists if its unit runs. If its unit has
    stopped or failed to start since the host booted, MachineRunning is known; the machine may have been removed since.
    """
    if not isinstance(machine.root, Unseen) or not machine.ended:
        return tuple(conditions)
    why = f"whether machine {machine.name} exists is unknown: {machine.root.why}"
    changed = {ConditionType.MACHINE_RUNNING, ConditionType.READY}
    if machine.has_run:
        false_ready = any(each.type is ConditionType.READY and each.status is Status.FALSE for each in conditions)
        changed = set() if false_ready else {ConditionType.READY}
    return tuple(
        unknown(each.type, Reason.OBSERVATION_FAILED, why)
        if each.type in changed and each.status is not Status.UNKNOWN
        else each
        for each in conditions
    )
