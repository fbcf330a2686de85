"""The record of prepared claims survives damage, because the kubelet has a record too."""

import os
from pathlib import Path

import pytest

from agent.dra.claims import RECORD_NAME
from agent.model.errors import AgentError
from tests.fakes.dra_node import GPUS, KUBELET, Node, claim, reference


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("damage", ["gone", "torn", "changed", "empty", "newer", "directory"])
def test_a_damaged_checkpoint_is_made_again_from_the_kubelets_record(
    node: Node, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """So that a device that a pod has is not given to another one."""
    node.api["a"] = claim("a", GPUS[0])
    prepared = node.claims.prepare(reference("a"))
    content = node.checkpoint.read_bytes()
    changed = {
        "torn": content[: len(content) // 2],
        "changed": content.replace(b"0000-01", b"0000-02"),
        "empty": b"",
        "newer": content.replace(b'"version": 1', b'"version": 2'),
    }
    if damage in changed:
        node.checkpoint.write_bytes(changed[damage])
    else:
        node.checkpoint.unlink()
    if damage == "directory":
        node.checkpoint.mkdir()
    node.kubelet_has(reference("a"))
    claims = node.restarted()
    assert claims.prepared == {reference("a"): prepared}
    assert "1 claims are taken from the kubelet's record" in caplog.text
    node.api["b"] = claim("b", GPUS[0])
    with pytest.raises(AgentError, match="cannot have"):
        claims.prepare(reference("b"))


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{}",
        "[]",
        '{"Data": 5}',
        '{"Data": "x"}',
        '{"Data": "{}"}',
        '{"Data": "{\\"ClaimInfoStateList\\": [5]}"}',
        '{"Data": "{\\"ClaimInfoStateList\\": null}"}',
    ],
)
def test_no_record_stops_the_service(node: Node, record: str) -> None:
    """The format is the kubelet's own, and may change. The scheduler is the first guard."""
    (node.tree / KUBELET[1:] / RECORD_NAME).write_text(record)
    assert node.restarted().prepared == {}


def test_the_kubelet_does_not_wait_for_the_disk(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of this process forgets nothing all the same; what is written is soon made durable, once."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    node.api["a"] = claim("a", GPUS[0])
    prepared = node.claims.prepare(reference("a"))
    assert synced == []
    assert node.restarted().prepared == {reference("a"): prepared}
    assert synced == [str(node.checkpoint), str(node.checkpoint.parent)]
