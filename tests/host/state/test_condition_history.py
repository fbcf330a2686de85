"""The history of conditions, which programs and the release before and after this one read."""

import json
import time
from pathlib import Path

import pytest

from agent.host.state.records import read_history, write_history
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.paths import CONDITIONS
from tests.fakes.host import Host

READY = Condition(ConditionType.READY, Status.FALSE, "MachineStopped", "no", 1700000000.5, (1600000000.0,), 2.0)
RECORD = {
    "type": "Ready",
    "status": "False",
    "reason": "MachineStopped",
    "message": "no",
    "last_transition": 1700000000.5,
    "losses": [1600000000.0],
    "good_since": 2.0,
    "gpus": [],
    "said": None,
}


def test_the_file(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert write_history(host, {"gpu-node": (READY,)}) == ()
    written = host.identity(CONDITIONS)
    assert write_history(host, {"gpu-node": (READY,)}) == ()
    assert host.identity(CONDITIONS) == written, "the same history is not written again"
    document = json.loads(host.read(CONDITIONS))
    assert abs(document["gpu-node"][0].pop("booted") - (time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))) < 60
    suspended = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    assert abs(document["gpu-node"][0].pop("suspended") - suspended) < 60
    assert document == {"gpu-node": [RECORD]}
    assert read_history(host) == {"gpu-node": (READY,)}


@pytest.mark.parametrize(
    "damage", [{"last_transition": 1e18}, {"losses": [-1e18]}, {"good_since": 1e300}, {"booted": 1e18}]
)
def test_a_time_that_is_no_date_is_damage(tmp_path: Path, damage: dict[str, object]) -> None:
    """Neither the pages nor `status --json` could be made of it: the service would end again and again."""
    host = Host(tmp_path)
    host.write(CONDITIONS, json.dumps({"gpu-node": [{**RECORD, **damage}]}).encode())
    assert read_history(host) == {}
    assert write_history(host, {"gpu-node": (READY,)}) == ()
    assert read_history(host) == {"gpu-node": (READY,)}


def test_times_from_before_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a battery boots in 1970. `status` said "ready, for 20717 d" once the network had the time."""
    host, real = Host(tmp_path), time.time
    now = real()
    monkeypatch.setattr(time, "time", lambda: real() - now + 100)
    ready = Condition(ConditionType.READY, Status.TRUE, "x", "", 90.0, (30.0, 60.0), 80.0)
    never = ready._replace(last_transition=0.0, losses=(), good_since=0.0)
    assert write_history(host, {"gpu-node": (never, ready)}) == ()
    assert read_history(host) == {"gpu-node": (never, ready)}
    monkeypatch.setattr(time, "time", real)
    for _ in range(2):
        first, second = read_history(host)["gpu-node"]
        assert first == never
        times = (second.last_transition, *second.losses, second.good_since)
        assert [round(now - each) for each in times] == [10, 70, 40, 20]
        assert write_history(host, {"gpu-node": (first, second)}) == ()
