"""Records stay readable in both directions: if a release fails, the former one reads what it wrote.

tests/data/records.json has the formats of the last release: each release writes them (UPDATE_GOLDEN=1). A format
that must change needs two releases: the first reads both and writes the old one.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.json import schema

from agent.host.driver_upgrade import DriverUpgrade
from agent.host.provision.node_files import NodeRecord
from agent.host.state.gpus import GpuNote, LogPosition
from agent.host.state.records import Handed, Owned
from agent.host.state.switches import Switch
from agent.model.facts import Granted, LiveSettings, Remembered, StagedRoot
from agent.model.node import AsFound
from tests.fakes.golden import GOLDEN, UPDATE

KINDS = (
    AsFound,
    DriverUpgrade,
    GpuNote,
    Granted,
    Handed,
    LiveSettings,
    LogPosition,
    NodeRecord,
    Owned,
    Remembered,
    StagedRoot,
    Switch,
)
CACHES = {"ServiceState", "_Copy", "Observation", "_Condition", "CheckResult"}
"""What the next pass makes again."""
TIMES = {"Time"}
"""Lists of times, which have no fields."""
AGENT = Path(__file__).parents[2] / "agent"
MADE = re.compile(
    r"= (?:Record|Durable|Digested|_OwnedFiles|Format)\((?:dict\[str, (?:tuple\[)?)?(\w+)[^(,)]*(?:, (\d+))?"
)


def versions() -> dict[str, int]:
    """Return the versions of formats by the name of their kind; 0 without one."""
    found = dict[str, int]()
    for directory in ("host", "model"):
        for path in (AGENT / directory).rglob("*.py"):
            made = MADE.findall(path.read_text())
            found |= {kind: int(version or 0) for kind, version in made if kind != "kind"}
    return found


def hook(kind: type) -> dict[str, str]:
    return {"type": kind.__name__}


def formats() -> dict[str, Any]:
    """Return the version of each format, and the types of the objects in it."""
    found = dict[str, Any]({f"{kind.__name__} version": versions()[kind.__name__] for kind in KINDS})
    for kind in KINDS:
        for name, definition in schema(kind, schema_hook=hook)["$defs"].items():
            found[name] = {key: definition[key] for key in definition if key not in ("title", "description")}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def breaks(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield why one of the releases could not read what the other one writes."""
    for name, before in old.items():
        after = new.get(name)
        if not isinstance(before, dict) or "properties" not in before or not isinstance(after, dict):
            if before != after:
                yield f"{name} was {before}, and is {after}"
            continue
        had, has = before["properties"], after.get("properties", {})
        yield from (f"{name}.{key} is missing" for key in before.get("required", ()) if key not in has)
        yield from (f"{name}.{key} has another type" for key in had if key in has and had[key] != has[key])
        yield from (f"{name}.{key} has no default" for key in after.get("required", ()) if key not in had)


def test_every_record_is_looked_at() -> None:
    assert set(versions()) == {kind.__name__ for kind in KINDS} | CACHES | TIMES


def test_the_releases_read_each_others_records() -> None:
    file = GOLDEN.parent / "records.json"
    if os.environ.get(UPDATE):
        file.write_text(json.dumps(formats(), indent=1, sort_keys=True) + "\n")
    assert list(breaks(json.loads(file.read_text()), formats())) == []


OLD = {"A version": 1, "A": {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a"]}}


@pytest.mark.parametrize(
    ("new", "found"),
    [
        ({"properties": {"a": {"type": "string"}, "c": {"type": "string"}}, "required": ["a"]}, []),
        ({"properties": {"b": {"type": "string"}}}, ["A.a is missing"]),
        ({"properties": {"a": {"type": "number"}}, "required": ["a"]}, ["A.a has another type"]),
        ({"properties": {"a": {"type": "string"}, "c": {}}, "required": ["a", "c"]}, ["A.c has no default"]),
    ],
)
def test_what_the_other_release_could_not_read(new: dict[str, Any], found: list[str]) -> None:
    assert list(breaks(OLD, {**OLD, "A": new})) == found
    assert list(breaks(OLD, {**OLD, "A version": 2})) == ["A version was 1, and is 2"]
