"""Which reports count as the answer to a handoff. Whole passes are in tests/host/test_reconcile.py."""

import pytest
from msgspec.structs import replace

from agent.config.settings import Config
from agent.host.plan.goal import plan
from agent.host.verify.answers import STALE_AFTER, answers, released, why_unanswered
from agent.model.conditions import ConditionType, Reason, false
from agent.model.facts import Absent, Broken, FileState, Granted, LiveSettings, MachineFacts, Seen, Unseen
from agent.model.goal import MachineGoal
from agent.model.handoff import Publication, Report
from tests.fakes.facts import facts

NOW, BEFORE = Publication(2, 20), Publication(1, 10)


@pytest.fixture
def goal() -> MachineGoal:
    (goal,) = plan(Config.validated({"machines": {"gpu-node": {}}}), facts()).goal.machines
    return goal


def why(goal: MachineGoal, granted: Seen[Granted], age: float = 0.0, content: Seen[bytes] | None = None) -> str:
    machine = MachineFacts("active", name="gpu-node", root="/", granted=granted, granted_age=age)
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
        assert "if that lasts, `unbounded-agent apply`" in message, "it is so after every change, for a moment"
        assert "reboot" not in message


def test_who_may_not_read_the_record_is_not_told_that_it_is_missing(goal: MachineGoal) -> None:
    hidden = Unseen("granted.json: Permission denied")
    assert why(goal, hidden) == why(goal, goal.granted, 0.0, hidden) == why(goal, goal.granted)


def waiting(goal: MachineGoal, *, published: float, kept: float, reported: float = 0.0) -> MachineFacts:
    """Return a machine by the seconds since the handoff, the first kept permission, and its report; now is 10,000."""
    live = LiveSettings("", (), {}, kept_since=10_000.0 - kept if kept else 0.0)
    return MachineFacts(
        name="gpu-node",
        root="/",
        unit_state="active",
        granted=goal.granted,
        live=live,
        granted_age=published,
        report_age=reported,
    )


def is_released(machine: MachineFacts, goal: MachineGoal, report: Report | Absent | Broken | Unseen) -> bool:
    return released(machine, goal, report, 10_000.0)


def test_a_device_is_released_once_the_machine_has_answered(goal: MachineGoal) -> None:
    machine = waiting(goal, published=1.0, kept=1.0)
    assert is_released(machine, goal, Report(goal.generation, ()))
    assert not is_released(machine, goal, Report("an earlier one", ()))


@pytest.mark.parametrize("report", [Absent("no report"), Broken("not JSON")])
def test_a_machine_that_does_not_report_prolongs_nothing(goal: MachineGoal, report: Absent | Broken) -> None:
    assert is_released(waiting(goal, published=1.0, kept=1.0), goal, report)


@pytest.mark.parametrize("report", [Report("an earlier one", ()), Unseen("Input/output error")])
def test_a_machine_has_limited_time_to_stop_using_a_device(goal: MachineGoal, report: Report | Unseen) -> None:
    """Since the handoff was published or, on a disk that is full, since the device was withdrawn."""
    late = STALE_AFTER + 1
    assert not is_released(waiting(goal, published=STALE_AFTER, kept=STALE_AFTER), goal, report)
    assert not is_released(waiting(goal, published=1.0, kept=0.0), goal, report)
    assert is_released(waiting(goal, published=late, kept=1.0), goal, report)
    assert is_released(waiting(goal, published=1.0, kept=late), goal, report)
    assert is_released(waiting(goal, published=1.0, kept=1.0, reported=late), goal, report), "it reports no longer"
    unpublished = replace(waiting(goal, published=late, kept=1.0), granted=replace(goal.granted, gpus=()))
    assert not is_released(unpublished, goal, report), "the age is that of another handoff"
    assert is_released(replace(unpublished, live=waiting(goal, published=1.0, kept=late).live), goal, report)


@pytest.mark.parametrize(
    ("reported", "bound", "published", "named", "counts"),
    # Ages in seconds, and whether both halves know the publication.
    [
        (1.0, 5.0, 5.0, True, True),
        (5.0, 1.0, 1.0, True, False),
        (3.0, 5.0, 1.0, True, True),
        (3.0, 5.0, 1.0, False, False),
        (5.0, 1.0, 8.0, False, False),
    ],
)
def test_missing_nodes_are_believed_only_after_they_were_bound(
    goal: MachineGoal, reported: float, bound: float, published: float, named: bool, counts: bool
) -> None:
    publication = NOW if named else None
    machine = MachineFacts("active", name="gpu-node", root="/", publication=publication)
    machine = replace(machine, report_age=reported, live_age=bound, granted_age=published)
    missing = false(ConditionType.DEVICES_ALLOWED, Reason.WRONG_NODE, "/dev/nvidia0 is missing")
    assert answers(Report(goal.generation, (missing,), publication=publication), machine, goal) is counts
    assert answers(Report(goal.generation, (), publication=publication), machine, goal)
