"""Which reports count as the answer to a handoff. Whole passes are in tests/host/test_reconcile.py."""

import pytest

from agent.host.observe.machine_report import Report
from agent.host.verify.answers import STALE_AFTER, names_handoff, why_unanswered
from agent.model.facts import MachineFacts
from agent.model.handoff import Publication

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


def test_a_machine_that_does_not_answer_for_long_has_a_next_step() -> None:
    machine = MachineFacts("gpu-node", "/var/lib/machines/gpu-node", "active", granted_age=STALE_AFTER + 1)
    assert "run `machinectl reboot gpu-node`" in why_unanswered(machine)
    (recent,) = {why_unanswered(MachineFacts("a", "/", "active", granted_age=age)) for age in (0.0, STALE_AFTER)}
    assert recent == "the machine has not answered the latest handoff yet"
