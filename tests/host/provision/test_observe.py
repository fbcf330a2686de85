"""What `up` and `reset` see of machines whose names end in what the agent appends to names."""

from pathlib import Path

import pytest

from agent.host.provision.node_files import NODE_RECORDS, NodeRecord, record_paths
from agent.host.provision.plan import made_nodes, observe_node
from agent.model.node import NodeImage
from agent.model.paths import PARTIAL, cordoned_file, staged_root
from tests.fakes.host import Host

NAMES = ("x", "x.copy", "x.copy.copy", "x.cordoned", "x.json", "x.unbounded-agent-y")
IMAGE = NodeImage("oci:/image", "", "amd64", 0)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def record(name: str) -> NodeRecord:
    return NodeRecord(name, IMAGE, 1, {}, {}, {}, 1.0)


@pytest.mark.parametrize("copy", [0, 1])
def test_each_node_has_its_own_record(host: Host, copy: int) -> None:
    """Also when one copy is lost."""
    for name in NAMES:
        NODE_RECORDS.write(record_paths(name), record(name), host)
        host.file(cordoned_file(name), name)
    for name in NAMES:
        host.remove(record_paths(name)[copy])
    assert made_nodes(host) == NAMES
    assert [observe_node(name, host).record for name in NAMES] == [record(name) for name in NAMES]


def test_a_node_without_a_record_does_not_have_anothers(host: Host) -> None:
    NODE_RECORDS.write(record_paths("x.copy"), record("x.copy"), host)
    assert made_nodes(host) == ("x.copy",)
    assert not isinstance(observe_node("x", host).record, NodeRecord)


def test_each_machine_has_its_own_unfinished_files(host: Host) -> None:
    staged = {name: staged_root(name, "sha256:" + "a1" * 32) for name in NAMES}
    for path in staged.values():
        host.make_directory(path)
    assert {name: observe_node(name, host).staged for name in NAMES} == {name: (staged[name],) for name in NAMES}


def test_what_an_interrupted_pull_left_is_seen(host: Host) -> None:
    """Even if the next attempt makes the machine from another image, or there is none."""
    partial = {name: staged_root(name, "sha256:" + "a1" * 32) + PARTIAL for name in NAMES}
    for path in partial.values():
        host.make_directory(f"{path}/image/blobs")
    assert {name: observe_node(name, host).staged for name in NAMES} == {name: (partial[name],) for name in NAMES}
