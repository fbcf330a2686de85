"""Adds to MachineRunning which of the machine's conditions this release does not know. Pure."""

from collections.abc import Sequence

from agent.host.observe.machine_report import Report
from agent.host.verify.answers import MACHINE_SAYS, STALE_AFTER
from agent.model.conditions import Condition, ConditionType
from agent.model.facts import MachineFacts
from agent.model.handoff import with_remark
from agent.model.text import first_of

NAMED = 3
"""How many unknown conditions the message names; it counts the others."""


def with_ignored(
    conditions: Sequence[Condition], machine: MachineFacts, report: Report | None
) -> tuple[Condition, ...]:
    """Return the conditions. If the report is current, add to MachineRunning's message what this release ignores in it.

    No status changes: what the unknown conditions mean is not known, and all others still count.
    """
    current = machine.unit_state == "active" and machine.report_age <= STALE_AFTER
    if report is None or not report.unknown_conditions or not current:
        return tuple(conditions)
    remark = (
        f"; {MACHINE_SAYS}{first_of(report.unknown_conditions, NAMED)}, which this release does not know and ignores: "
        "install on the host the release of the agent that the machine's image has"
    )
    return with_remark(conditions, ConditionType.MACHINE_RUNNING, remark)
