"""Specifications are published without empty entries and with the lowest version.

integration/tests/drivers/test_cdi_documents.py compares this with the Container Device Interface's own library.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.machine.run import run
from agent.vendors.cdi import lowest_version, normalised, without_groups
from tests.fakes.cdi_specs import NODE, VERSIONS, Spec, drm_spec, spec
from tests.fakes.json_values import JSON
from tests.fakes.machine import gpu_machine, nvidia_ctk, recorded_spec


@pytest.mark.parametrize("name", VERSIONS)
def test_the_lowest_version_that_has_all(name: str) -> None:
    document, version = VERSIONS[name]
    found = normalised(document)
    assert isinstance(found, dict)
    assert found["cdiVersion"] == version
    assert lowest_version(found) == version


def test_nothing_empty_is_left() -> None:
    empty: Spec = {"env": [], "deviceNodes": [NODE | {"hostPath": "", "fileMode": None, "minor": 0}], "mounts": None}
    document = spec(empty, {"hooks": [], "mounts": []}, annotations={})
    assert normalised(document) == {
        "cdiVersion": "0.3.0",
        "kind": "vendor.com/class",
        "devices": [{"name": "x0", "containerEdits": {"deviceNodes": [NODE | {"minor": 0}]}}],
    }


def test_a_device_without_edits_is_not_hidden() -> None:
    """A device without edits makes the whole specification invalid for runtimes, so verification must see it."""
    document = recorded_spec()
    document["devices"][0]["containerEdits"] = {"deviceNodes": [], "mounts": []}
    found = normalised(document)
    assert isinstance(found, dict)
    assert found["devices"][0] == {"name": "0", "containerEdits": {}}


def test_a_correct_spec_is_not_changed() -> None:
    assert normalised(recorded_spec()) == recorded_spec()
    assert normalised(normalised(drm_spec())) == normalised(drm_spec())


@given(JSON, st.data())
def test_no_json_breaks_it(value: object, data: st.DataObject) -> None:
    document: Any = drm_spec()
    place: Any = {"": document}
    container, key = place, ""
    while isinstance(container[key], dict | list) and container[key] and data.draw(st.booleans()):
        container = container[key]
        keys = sorted(container) if isinstance(container, dict) else list(range(len(container)))
        key = data.draw(st.sampled_from(keys))
    container[key] = value
    without_groups(normalised(place[""]))


def test_groups_are_removed_from_devices_and_common_edits() -> None:
    document = normalised(spec({"deviceNodes": [NODE], "additionalGids": [44]}, {"additionalGids": [44]}))
    assert isinstance(document, dict)
    assert document["cdiVersion"] == "0.7.0"
    assert without_groups(document) == normalised(spec())
    recorded = normalised(recorded_spec())
    assert without_groups(recorded) == recorded


def test_the_published_spec_is_normalised(tmp_path: Path) -> None:
    """This holds whatever the generator writes."""
    machine = gpu_machine(tmp_path / "machine")
    wordy = recorded_spec() | {"cdiVersion": "1.0.0", "annotations": {}}
    wordy["containerEdits"]["additionalGids"] = []
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, wordy))
    run(machine)
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")
    published = json.loads(machine.read("/etc/cdi/nvidia.yaml"))
    assert published["cdiVersion"] == "0.5.0"
    assert "annotations" not in published
    assert "additionalGids" not in published["containerEdits"]
