"""Which reports count as the answer to a handoff. Whole passes are in tests/host/test_reconcile.py."""

import pytest
from msgspec.structs import replace

from agent.config.settings import Config
from agent.host.observe.machine_report import Report
from agent.host.plan.goal import plan
from agent.host.verify.answers import STALE_AFTER, names_handoff, why_unanswered
from agent.model.facts import Absent, FileState, MachineFacts, Seen, Unseen
from agent.model.goal import MachineGoal
from agent.model.granted import Granted
from agent.model.handoff import Publication
from tests.fakes.facts import facts

NOW, BEFORE = Publication(2, 20), Publication(1, 10)


@pytest.mark.parametrize(
    ("published", "reported", "counts"),
    [
        (NOW, NOW, True),
        (NOW, BEFORE, False),
        (NOW, Publication(NOW.inode, BEFORE.mtime_ns), False),
        (NOW, Publication(BEFORE.inode, NOW.mtime_ns), False),
        (NOW, None, True),
        (None, BEFORE, True),
        (None, None, True),
    ],
)
def test_a_report_names_the_publication_if_both_halves_know_it(
    published: Publication | None, reported: Publication | None, counts: bool
) -> None:
    machine = MachineFacts("gpu-node", "/var/lib/machines/gpu-node", "active", publication=published)
    report = Report("a1", "", (), publication=reported)
    assert names_handoff(report, machine, "a1") is counts
    assert not names_handoff(report, machine, "b2")


@pytest.fixture
def goal() -> MachineGoal:
    (goal,) = plan(Config.validated({"machines": {"gpu-node": {}}}), facts()).goal.machines
    return goal


def why(goal: MachineGoal, granted: Seen[Granted], age: float = 0.0, content: Seen[bytes] | None = None) -> str:
    machine = MachineFacts("gpu-node", "/", "active", granted=granted, granted_age=age)
    file = FileState(goal.handoff_file.content if content is None else content, owned=False)
    return why_unanswered(machine, goal, replace(facts(), files={goal.handoff_file.path: file}))


def test_a_machine_that_does_not_answer_for_long_has_a_next_step(goal: MachineGoal) -> None:
    said = why(goal, goal.granted, STALE_AFTER + 1)
    assert "run `unbounded-agent restart gpu-node --kubeconfig FILE` (if `up` did not make its node: " in said
    (recent,) = {why(goal, goal.granted, age) for age in (0.0, STALE_AFTER)}
    assert recent == "the machine has not answered the latest handoff yet"


def test_a_machine_cannot_answer_what_is_not_written(goal: MachineGoal) -> None:
    """The record is of an older grant. Its age said at once that the machine had been silent, and to reboot it."""
    older, old = replace(goal.granted, gpus=()), STALE_AFTER + 1
    for message in (
        why(goal, older, old),
        why(goal, Absent("no such file"), old),
        why(goal, goal.granted, old, b"the handoff before"),
    ):
        assert message.startswith("the agent has not written the latest handoff yet")
        assert "`unbounded-agent apply`" in message
        assert "reboot" not in message


def test_who_may_not_read_the_record_is_not_told_that_it_is_missing(goal: MachineGoal) -> None:
    hidden = Unseen("granted.json: Permission denied")
    assert why(goal, hidden) == why(goal, goal.granted, 0.0, hidden) == why(goal, goal.granted)
