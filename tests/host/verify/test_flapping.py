"""Ready that changes often, and work in progress that never ends."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.host.state.records import read_history, write_history
from agent.host.verify.readiness import LOSSES, SETTLING, STARTING_LIMIT, WINDOW, in_time, settled
from agent.model.conditions import (
    Condition,
    ConditionType,
    Reason,
    Status,
    false,
    summarize,
    true,
    unknown,
    with_transitions,
)
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host

GOOD = true(ConditionType.READY, Reason.ALL_CONDITIONS_TRUE, "")
BAD = false(ConditionType.READY, Reason.NODES_MISSING, "")
OPEN = unknown(ConditionType.READY, Reason.HANDOFF_PENDING, "")
START = 1_700_000_000.0


class Machine:
    """One machine's Ready over time."""

    def __init__(self) -> None:
        self.now = START
        self.ready: Condition | None = None

    def see(self, found: Condition, after: float = 10.0) -> Condition:
        self.now += after
        self.ready = settled(found, self.ready, self.now)
        return self.ready

    def flap(self, times: int) -> None:
        for _ in range(times):
            self.see(GOOD)
            self.see(BAD)


def test_neither_the_first_time_nor_few_losses_nor_waiting_for_reports_delay_recovery() -> None:
    machine = Machine()
    assert [machine.see(each).status for each in (OPEN, BAD, OPEN, BAD, OPEN, BAD, OPEN, BAD, GOOD)][-1] is Status.TRUE
    for _ in range(LOSSES - 1):
        assert machine.see(BAD).status is Status.FALSE
        assert machine.see(GOOD).status is Status.TRUE
    for _ in range(3 * LOSSES):
        assert machine.see(OPEN).status is Status.UNKNOWN
        assert machine.see(GOOD).status is Status.TRUE


def test_ready_has_to_settle_after_many_losses_until_they_are_forgotten() -> None:
    machine = Machine()
    machine.flap(LOSSES)
    assert machine.see(GOOD).reason == "Settling"
    assert machine.see(BAD, SETTLING - 1).reason == "NodesMissing"
    held = machine.see(GOOD)
    assert (held.status, held.reason) == (Status.FALSE, "Settling"), "a fault restarts the time"
    assert machine.see(GOOD, SETTLING - 1) == held, "the same until the end, so nothing is written again"
    assert [machine.see(GOOD, 1).status, machine.see(GOOD).status] == [Status.TRUE, Status.TRUE]
    machine.flap(LOSSES)
    machine.see(BAD, WINDOW)
    assert machine.see(GOOD).status is Status.TRUE


@given(st.lists(st.tuples(st.sampled_from([GOOD, BAD, OPEN]), st.floats(0, 2000))))
def test_true_is_never_shown_for_a_bad_condition(steps: Sequence[tuple[Condition, float]]) -> None:
    """A condition that stays good becomes True again."""
    machine = Machine()
    for found, after in steps:
        shown = machine.see(found, after)
        assert shown.status is found.status or (found is GOOD and shown.reason == "Settling")
        assert len(shown.losses) <= len(steps)
    machine.see(GOOD)
    assert machine.see(GOOD, SETTLING).status is Status.TRUE


def test_passes_remember_losses(gpu_host: Host) -> None:
    """A driver disappears and returns. The machine is stopped, so the losses are written to the history."""
    passes = reconciler(gpu_host)
    outcome = passes.run_pass()
    (machine,) = outcome.machines
    before = [each for each in machine.conditions if each.type is not ConditionType.READY]
    ready = Condition(ConditionType.READY, Status.TRUE, "AllConditionsTrue", "", START, (), START)
    write_history(gpu_host, {MACHINE: (*before, ready)})
    (machine,) = passes.run_pass().machines
    assert machine.conditions[-1].status is Status.FALSE
    assert len(machine.conditions[-1].losses) == 1
    assert read_history(gpu_host)[MACHINE][-1].losses == machine.conditions[-1].losses


# ---- work in progress


def fabric(found: Condition, before: tuple[Condition, ...], now: float) -> tuple[Condition, ...]:
    others = in_time((found, true(ConditionType.DRIVER_LOADED, Reason.LOADED, "")), before, now)
    return with_transitions((*others, summarize(others)), before, now)


STARTING = unknown(
    ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_STARTING, "nvidia-fabricmanager.service is starting"
)
ACTIVE = true(ConditionType.FABRIC_READY, Reason.FABRIC_MANAGER_ACTIVE, "")


def test_a_start_in_progress_is_not_a_fault_unless_it_lasts_forever() -> None:
    seen = fabric(STARTING, (), START)
    assert (seen[0].status, seen[-1].status) == (Status.UNKNOWN, Status.UNKNOWN)
    seen = fabric(STARTING, seen, START + STARTING_LIMIT)
    assert seen[0].status is Status.UNKNOWN
    for later in (1.0, 2.0, 1000.0):
        seen = fabric(STARTING, seen, START + STARTING_LIMIT + later)
        assert (seen[0].status, seen[0].reason) == (Status.FALSE, "FabricManagerStuck")
        assert "is starting, and has not finished within 5 minutes; see the unit's log" in seen[0].message
        assert seen[0].last_transition == START + STARTING_LIMIT + 1.0
        assert (seen[-1].status, seen[-1].reason) == (Status.FALSE, "FabricManagerStuck")
    seen = fabric(ACTIVE, seen, START + 5000)
    assert [each.status for each in seen] == [Status.TRUE] * 3


@pytest.mark.parametrize(
    ("jump", "suspended"), [(-86400.0, 0.0), (86400.0, 0.0), (7200.0, 7200.0)], ids=["back", "ahead", "suspend"]
)
def test_neither_a_clock_jump_nor_a_suspend_ends_or_prolongs_a_wait(
    host: Host, jump: float, suspended: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    machine.now = time.time()
    machine.flap(LOSSES)
    ready, (starting, *_) = machine.see(GOOD), fabric(STARTING, (), machine.now)
    write_history(host, {MACHINE: (starting, ready)})
    real, since_boot = time.time, time.clock_gettime
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: since_boot(clock) + suspended)
    machine.now += jump
    before = read_history(host)[MACHINE]
    machine.ready = before[-1]
    assert machine.see(GOOD, SETTLING - 1).reason == "Settling"
    assert machine.see(GOOD, 2).status is Status.TRUE
    for waited, status in ((STARTING_LIMIT - 1, Status.UNKNOWN), (STARTING_LIMIT + 1, Status.FALSE)):
        assert fabric(STARTING, before, starting.last_transition + jump + waited)[0].status is status


@pytest.mark.parametrize("before", [ACTIVE, unknown(ConditionType.FABRIC_READY, Reason.OBSERVATION_FAILED, "")])
def test_only_the_time_of_starting_counts(before: Condition) -> None:
    seen = fabric(before, (), START)
    seen = fabric(STARTING, seen, START + STARTING_LIMIT + 1)
    assert seen[0].status is Status.UNKNOWN
