"""Only a machine that runs, and whose machine half does, says which of its files have changed."""

import pytest
from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings
from agent.host.verify.answers import STALE_AFTER
from agent.model.conditions import ConditionType, Reason
from agent.model.facts import Report
from tests.fakes.facts import MACHINE, at_rest, evaluated, facts
from tests.fakes.node_settings import node_settings

REPORT = Report("", "", (), changed_files=("/etc/a",))


@pytest.mark.parametrize(
    ("state", "age", "reason"),
    [
        ("active", 0.0, Reason.NODE_FILES_CHANGED),
        ("active", STALE_AFTER + 1, Reason.RUNNING),
        ("inactive", 0.0, Reason.NOT_STARTED),
    ],
)
def test_old_reports_say_nothing(state: str, age: float, reason: Reason) -> None:
    config = Config(machines={MACHINE: MachineSettings(node=node_settings())})
    seen, goal = at_rest(facts(), config)
    seen = replace(seen, machines=(replace(seen.machines[0], unit_state=state, report_age=age),))
    found = {each.type: each for each in evaluated(config.machines[MACHINE], goal, seen, REPORT)}
    assert found[ConditionType.MACHINE_RUNNING].reason == reason
    assert ("/etc/a" in found[ConditionType.MACHINE_RUNNING].message) == (reason is Reason.NODE_FILES_CHANGED)
