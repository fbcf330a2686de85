"""The history of conditions, which programs and the release before and after this one read."""

import json
from pathlib import Path

from agent.host.state.condition_history import read_history, write_history
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
}


def test_the_file(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert write_history(host, {"gpu-node": (READY,)}) == ()
    written = host.identity(CONDITIONS)
    assert write_history(host, {"gpu-node": (READY,)}) == ()
    assert host.identity(CONDITIONS) == written, "the same history is not written again"
    assert json.loads(host.read(CONDITIONS)) == {"gpu-node": [RECORD]}
    assert read_history(host) == {"gpu-node": (READY,)}


def test_the_file_of_another_release(tmp_path: Path) -> None:
    """Earlier code also wrote the key `count`, and still earlier code wrote fewer keys."""
    host = Host(tmp_path)
    known = {key: RECORD[key] for key in ("type", "status", "reason", "message")}
    host.write(CONDITIONS, json.dumps({"a": [{**RECORD, "count": None}], "b": [known]}).encode())
    assert read_history(host) == {"a": (READY,), "b": (READY._replace(last_transition=0.0, losses=(), good_since=0.0),)}
