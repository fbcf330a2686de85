"""MachineRunning says which of a newer machine half's conditions this release ignores."""

import pytest

from agent.host.observe.machine import Report
from agent.host.verify.answers import STALE_AFTER
from agent.host.verify.readiness import with_ignored
from agent.model.conditions import ConditionType, Reason, true
from agent.model.facts import MachineFacts

RUNNING = true(ConditionType.MACHINE_RUNNING, Reason.RUNNING, "machine gpu-node is running")


@pytest.mark.parametrize(
    ("state", "age", "shown"), [("active", 0.0, True), ("active", STALE_AFTER + 1, False), ("inactive", 0.0, False)]
)
def test_only_a_current_report_counts(state: str, age: float, shown: bool) -> None:
    machine = MachineFacts("gpu-node", root="/var/lib/machines/gpu-node", unit_state=state, report_age=age)
    report = Report("", "", (), unknown_conditions=("NewCheck=False (Failed)",))
    (condition,) = with_ignored((RUNNING,), machine, report)
    assert condition[:3] == RUNNING[:3], "the status stays"
    assert ("machine says: NewCheck=False (Failed), which this release does not know" in condition.message) == shown


def test_a_known_report_adds_nothing() -> None:
    machine = MachineFacts("gpu-node", root="/var/lib/machines/gpu-node", unit_state="active", report_age=0.0)
    assert with_ignored((RUNNING,), machine, Report("", "", ())) == (RUNNING,)
    assert with_ignored((RUNNING,), machine, None) == (RUNNING,)
