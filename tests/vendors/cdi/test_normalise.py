"""Specifications are published with a version that has all their parts, and that every containerd with CDI knows.

integration/tests/drivers/test_cdi_documents.py compares this with the Container Device Interface's own library.
"""

import json
from pathlib import Path

import pytest

from agent.vendors.cdi import normalised, without_groups
from tests.fakes.cdi_specs import NODE, VERSIONS, spec
from tests.fakes.machine import gpu_machine, nvidia_ctk, recorded_spec


@pytest.mark.parametrize("name", VERSIONS)
def test_a_version_that_has_all(name: str) -> None:
    document, version = VERSIONS[name]
    assert normalised(document) == document | {"cdiVersion": version}


def test_groups_are_removed_from_devices_and_common_edits() -> None:
    document = normalised(spec({"deviceNodes": [NODE], "additionalGids": [44]}, {"additionalGids": [44]}))
    assert isinstance(document, dict)
    assert document["cdiVersion"] == "0.7.0"
    assert without_groups(document) == normalised(spec())
    recorded = normalised(recorded_spec())
    assert without_groups(recorded) == recorded


def test_the_published_spec_is_normalised(tmp_path: Path) -> None:
    machine = gpu_machine(tmp_path / "machine")
    wordy = recorded_spec() | {"cdiVersion": "1.0.0"}
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, wordy))
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    published = json.loads(machine.read("/etc/cdi/nvidia.yaml"))
    assert published["cdiVersion"] == "0.5.0"
