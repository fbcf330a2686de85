"""Only a machine that runs, and whose machine half does, says which of its files have changed."""

import pytest

from agent.host.observe.machine import Report
from agent.host.verify.answers import STALE_AFTER
from agent.host.verify.readiness import with_changed_files
from agent.model.conditions import ConditionType, Reason, true
from agent.model.facts import MachineFacts

RUNNING = true(ConditionType.MACHINE_RUNNING, Reason.RUNNING, "machine gpu-node is running")


@pytest.mark.parametrize(
    ("state", "age", "reason"),
    [
        ("active", 0.0, Reason.NODE_FILES_CHANGED),
        ("active", STALE_AFTER + 1, Reason.RUNNING),
        ("inactive", 0.0, Reason.RUNNING),
    ],
)
def test_old_reports_say_nothing(state: str, age: float, reason: Reason) -> None:
    machine = MachineFacts("gpu-node", root="/var/lib/machines/gpu-node", unit_state=state, report_age=age)
    report = Report("", "", (), changed_files=("/etc/a",))
    (condition,) = with_changed_files((RUNNING,), machine, report)
    assert condition.reason == reason
