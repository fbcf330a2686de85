"""Events about the Node, on a simulated machine and an API server that stores them."""

import time
from pathlib import Path
from typing import Any

import pytest

from agent.machine import node_condition
from agent.machine.node_condition import HEARTBEAT
from agent.machine.node_events import EVENTS, HOUR, MOST
from agent.model.conditions import Condition, ConditionType, Reason, false, true, unknown
from tests.fakes.api_server import Object, failure
from tests.fakes.node import NODE, NOW, READY, Node, joined_node

BROKEN = false(ConditionType.READY, Reason.SPEC_REFUSED, "CDISpecCurrent: no libcuda")
NOTHING_KNOWN = unknown(ConditionType.READY, Reason.HANDOFF_PENDING, "the machine has not answered yet")


def fenced(*gpus: str) -> Condition:
    why = f"pods cannot use {', '.join(gpus)}, but all other GPUs; GPUsHealthy: {gpus[0]} needs a reset: Xid 79"
    return true(ConditionType.READY, Reason.SOME_GPUS_UNUSABLE, why)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    machine = joined_node(tmp_path / "machine")
    for path in [path for path in machine.api.objects if path.startswith(EVENTS)]:
        del machine.api.objects[path]
    return machine


def see(node: Node, ready: Condition, now: float) -> None:
    """Run while the host says this."""
    since_boot = time.monotonic
    with pytest.MonkeyPatch.context() as clocks:
        clocks.setattr(time, "time", lambda: now)
        clocks.setattr(time, "time_ns", lambda: int(now * 1e9))
        clocks.setattr(time, "monotonic", lambda: since_boot() + now - NOW)
        node.publish_status(ready, now)
        node_condition.run(node)
    assert node.outcome() == ("True", "Set")


def events(node: Node) -> list[dict[str, Any]]:
    return [item for path, item in sorted(node.api.objects.items()) if path.startswith(EVENTS)]


def said(node: Node) -> list[tuple[str, str, int]]:
    return [(each["type"], each["reason"], each["count"]) for each in events(node)]


def requests(node: Node) -> int:
    return sum(path.startswith(EVENTS) for _, path, _ in node.requests)


def test_a_healthy_node_has_no_event(node: Node) -> None:
    for after in (0, 60, HEARTBEAT + 60):
        see(node, READY, NOW + after)
    assert requests(node) == 0


def test_a_fault_and_its_end_are_said_once(node: Node) -> None:
    for after, ready in enumerate((READY, BROKEN, BROKEN, NOTHING_KNOWN, BROKEN, NOTHING_KNOWN, READY, READY)):
        see(node, ready, NOW + 60 * after)
    assert said(node) == [("Warning", "SpecRefused", 1), ("Normal", "AllConditionsTrue", 1)]
    warning, end = events(node)
    del warning["metadata"]["resourceVersion"]
    assert warning == {
        "metadata": {"name": f"{NODE}.{int((NOW + 60) * 1e9):x}", "namespace": "default"},
        "involvedObject": {"kind": "Node", "name": NODE, "uid": NODE},
        "type": "Warning",
        "reason": "SpecRefused",
        "message": "GPUReady is False: CDISpecCurrent: no libcuda",
        "source": {"component": "unbounded-agent", "host": NODE},
        "firstTimestamp": "2027-01-15T08:01:00Z",
        "lastTimestamp": "2027-01-15T08:01:00Z",
        "count": 1,
    }
    assert end["message"] == "GPUReady is True: the machine can run GPU workloads"
    assert requests(node) == 2


def test_a_fault_that_comes_again_is_counted(node: Node) -> None:
    for after, ready in enumerate((BROKEN, READY, BROKEN, READY)):
        see(node, ready, NOW + 60 * after)
    assert said(node) == [("Warning", "SpecRefused", 2), ("Normal", "AllConditionsTrue", 2)]
    assert events(node)[0]["firstTimestamp"] == "2027-01-15T08:00:00Z"
    assert events(node)[0]["lastTimestamp"] == "2027-01-15T08:02:00Z"
    # The API server forgets Events.
    node.api.objects = {path: item for path, item in node.api.objects.items() if not path.startswith(EVENTS)}
    see(node, BROKEN, NOW + 300)
    assert said(node) == [("Warning", "SpecRefused", 1)]


def test_each_gpu_that_is_fenced_is_said(node: Node) -> None:
    """The machine stays ready."""
    one, two = "0000:01:00.0", "0000:02:00.0"
    for after, ready in enumerate((READY, fenced(one), fenced(one), fenced(one, two), fenced(one, two))):
        see(node, ready, NOW + 60 * after)
    assert said(node) == [("Warning", "SomeGPUsUnusable", 2)]
    assert events(node)[0]["message"].startswith(f"GPUReady is True: pods cannot use {one}, {two}, but")


def test_the_details_of_a_fault_are_no_change(node: Node) -> None:
    for number in range(20):
        see(node, false(ConditionType.READY, Reason.STOPPED, f"for {number} s"), NOW + number)
    assert requests(node) == 1


def test_attack_events_are_no_flood(node: Node) -> None:
    """What is still true after an hour is said then."""
    for number in range(200):
        see(node, BROKEN if number % 2 else READY, NOW + number)
    assert requests(node) == MOST
    see(node, false(ConditionType.READY, Reason.STOPPED, "stopped"), NOW + 300)
    assert requests(node) == MOST
    see(node, false(ConditionType.READY, Reason.STOPPED, "stopped"), NOW + HOUR + 300)
    assert requests(node) == MOST + 1
    assert said(node)[-1] == ("Warning", "Stopped", 1)


@pytest.mark.parametrize("status", [403, 404, 429, 500])
def test_an_event_that_cannot_be_written_costs_nothing(
    node: Node, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: str, path: str) -> tuple[int, Object] | None:
        return failure(status, "no events here") if path.startswith(EVENTS) else None

    node.api.answer = refuse
    for number in range(30):
        see(node, BROKEN, NOW + 60 * number)
    assert node.on_node()["status"] == "False"
    assert requests(node) == MOST, "it tries again, but no flood"
    assert "cannot write an Event, and tries again: " in capsys.readouterr().err
    node.api.answer = None
    see(node, BROKEN, NOW + 2 * HOUR)
    assert said(node) == [("Warning", "SpecRefused", 1)]


def test_without_the_condition_there_is_no_event(node: Node) -> None:
    see(node, READY, NOW)
    Path(node.full_path(node_condition.HOST_STATUS)).unlink()
    node_condition.run(node)
    assert requests(node) == 0
