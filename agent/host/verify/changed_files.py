"""Adds to MachineRunning that files in a machine differ from those that `up` put there. Pure."""

from collections.abc import Sequence

from agent.host.observe.machine_report import Report
from agent.host.verify.answers import MACHINE_SAYS, STALE_AFTER
from agent.model.conditions import Condition, ConditionType, Status, true
from agent.model.facts import MachineFacts
from agent.model.reasons import Reason
from agent.model.text import first_of

NAMED = 3
"""How many changed files the message names; it counts the others."""


def with_changed_files(
    conditions: Sequence[Condition], machine: MachineFacts, report: Report | None
) -> tuple[Condition, ...]:
    """Return the conditions. If MachineRunning is True and the report is current, add the changed files to its message.

    MachineRunning stays True: pods run, and only an administrator knows whether the change is intended.
    """
    current = machine.unit_state == "active" and machine.report_age <= STALE_AFTER
    if report is None or not report.changed_files or not current:
        return tuple(conditions)
    kind, files = ConditionType.MACHINE_RUNNING, first_of(report.changed_files, NAMED)
    says = f"{MACHINE_SAYS}files differ from those that `up` put into it: {files}"
    advice = f"undo the change, or make the machine again: `unbounded-agent up --rebuild {machine.name}`"
    return tuple(
        true(kind, Reason.NODE_FILES_CHANGED, f"{each.message}; {says}; {advice}")
        if each.type is kind and each.status is Status.TRUE
        else each
        for each in conditions
    )
