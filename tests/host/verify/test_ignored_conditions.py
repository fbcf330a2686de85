"""MachineRunning says which of a newer machine half's conditions this release ignores."""

import pytest
from msgspec.structs import replace

from agent.host.verify.answers import STALE_AFTER
from agent.model.conditions import Condition, ConditionType
from agent.model.facts import Absent, Report, Seen
from tests.fakes.facts import CONFIG, MACHINE, at_rest, evaluated, facts


def running(report: Seen[Report], state: str = "active", age: float = 0.0) -> Condition:
    """Return MachineRunning of a machine with this report."""
    seen, goal = at_rest(facts())
    seen = replace(seen, machines=(replace(seen.machines[0], unit_state=state, report_age=age),))
    found = evaluated(CONFIG.machines[MACHINE], goal, seen, report)
    return next(each for each in found if each.type is ConditionType.MACHINE_RUNNING)


@pytest.mark.parametrize(
    ("state", "age", "shown"), [("active", 0.0, True), ("active", STALE_AFTER + 1, False), ("inactive", 0.0, False)]
)
def test_only_a_current_report_counts(state: str, age: float, shown: bool) -> None:
    report = Report("", "", (), unknown_conditions=("NewCheck=False (Failed)",))
    condition, without = running(report, state, age), running(Absent("none"), state, age)
    assert condition[:3] == without[:3], "the status stays"
    assert ("machine says: NewCheck=False (Failed), which this release does not know" in condition.message) == shown


def test_a_known_report_adds_nothing() -> None:
    assert running(Report("", "", ())) == running(Absent("none"))
