"""Claims are prepared as the API server has them, of devices that are there, and no device for two claims."""

import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent.dra.claims import ClaimReference, NotAllocatedError, PreparedDevice
from agent.dra.inventory import Device
from agent.model.errors import AgentError
from agent.model.paths import DRA_DRIVER
from tests.fakes.dra_node import GPUS, NODE, PARTITION, Node, claim, reference


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def contested(node: Node) -> Node:
    """A node where claim a has the GPU that the API server says claim b has, too."""
    node.api |= {"a": claim("a", GPUS[0]), "b": claim("b", GPUS[0])}
    node.claims.prepare(reference("a"))
    return node


def test_a_claim_gets_its_devices(node: Node) -> None:
    """Other drivers' devices do not count. A container names the request, not the alternative that was chosen."""
    node.api["a"] = document = claim("a", *GPUS, request="gpu/large")
    other = {"request": "nic", "driver": "nic.example", "pool": "other", "device": "nic0"}
    document["status"]["allocation"]["devices"]["results"].insert(0, other)
    prepared = node.claims.prepare(reference("a"))
    assert prepared == tuple(PreparedDevice(("gpu",), NODE, gpu, (f"vendor.com/gpu={gpu}",)) for gpu in GPUS)
    assert node.checkpoint.stat().st_mode & 0o777 == 0o600
    assert node.claims.prepare(reference("a")) == prepared
    assert node.restarted().prepared == {reference("a"): prepared}


def test_parameters_are_refused(node: Node) -> None:
    """The driver takes none. Those for other drivers are none of its business, and other kinds may come."""
    node.api["a"] = document = claim("a", GPUS[0])
    opaque = {"driver": "nic.example", "parameters": {}}
    config = [{"source": "FromClaim", "opaque": opaque}, {"source": "FromClass"}]
    document["status"]["allocation"]["devices"]["config"] = config
    assert node.claims.prepare(reference("a"))
    opaque["driver"] = DRA_DRIVER
    with pytest.raises(AgentError, match="which takes none"):
        node.claims.prepare(reference("a"))


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (claim("a", GPUS[0], uid="other"), "deleted and made again"),
        (claim("a"), "is not allocated"),
        (claim("a", GPUS[0], pool="node2"), "allocated in the pool node2"),
        (claim("a", GPUS[0], driver="other.example"), "no device of the driver"),
        (claim("a", GPUS[0], "gpu-0000-09-00-0"), "no device gpu-0000-09-00-0 now"),
    ],
)
def test_what_cannot_be_prepared_is_an_error_and_not_noted(node: Node, document: dict[str, Any], why: str) -> None:
    node.api["a"] = document
    with pytest.raises(AgentError, match=why):
        node.claims.prepare(reference("a"))
    node.claims.unprepare(reference("a"))
    assert not node.claims.prepared
    assert not node.checkpoint.exists()


def test_the_devices_are_those_of_now(node: Node) -> None:
    """As after a restart of the machine with other names, and then with one GPU less."""
    node.api["a"] = claim("a", GPUS[0])
    node.claims.prepare(reference("a"))
    node.devices[GPUS[0]] = node.devices[GPUS[0]]._replace(cdi_names=("vendor.com/gpu=new",))
    assert node.claims.prepare(reference("a"))[0].cdi_names == ("vendor.com/gpu=new",)
    assert node.restarted().prepared[reference("a")][0].cdi_names == ("vendor.com/gpu=new",)
    node.devices[GPUS[0]] = Device(GPUS[0], "vendor", (), "")
    for _ in range(2):
        with pytest.raises(AgentError, match="no verified CDI specification"):
            node.restarted().prepare(reference("a"))
        node.devices.pop(GPUS[0], None)
    node.restarted().unprepare(reference("a"))
    assert not node.restarted().prepared


@pytest.mark.parametrize(("first", "second"), [(GPUS[0], GPUS[0]), (GPUS[0], PARTITION), (PARTITION, GPUS[0])])
def test_a_device_goes_to_one_claim(node: Node, first: str, second: str) -> None:
    """Nor does a GPU go to one claim and its partition to another."""
    node.api["a"], node.api["b"] = claim("a", first), claim("b", second)
    node.claims.prepare(reference("a"))
    with pytest.raises(AgentError, match=f"{second}: it is allocated to claim default/a too"):
        node.claims.prepare(reference("b"))
    node.claims.unprepare(reference("a"))
    assert node.claims.prepare(reference("b"))


def test_several_claims_have_parts_of_a_gpu_or_monitor_it(node: Node) -> None:
    """Partitions, shares, and administrators, who see devices that others have."""
    other = f"{GPUS[0]}-mig-8-0"
    node.devices[other] = Device(other, "vendor", ("vendor.com/gpu=8",), "")
    node.api |= {"a": claim("a", PARTITION), "b": claim("b", other), "c": claim("c", GPUS[0], adminAccess=True)}
    node.api |= {"d": claim("d", GPUS[1], shareID="s1"), "e": claim("e", GPUS[1], shareID="s2")}
    assert all(node.claims.prepare(reference(name)) for name in ("a", "b", "c"))
    assert [node.claims.prepare(reference(name))[0].share for name in ("d", "e")] == ["s1", "s2"]
    node.api |= {"f": claim("f", GPUS[1], shareID="s2"), "g": claim("g", GPUS[1])}
    for name in ("f", "g"):
        with pytest.raises(AgentError, match="cannot have"):
            node.claims.prepare(reference(name))


def test_a_monitor_in_the_kubelets_record_keeps_no_device(node: Node) -> None:
    """The kubelet does not note adminAccess. Its record is used if ours is lost, and the monitor's pod goes on."""
    node.api |= {"a": claim("a", GPUS[0], adminAccess=True), "b": claim("b", GPUS[0]), "c": claim("c", GPUS[0])}
    node.kubelet_has(reference("a"))
    restarted = node.restarted()
    assert set(restarted.prepared) == {reference("a")}
    assert restarted.prepare(reference("b"))
    node.kubelet_has(reference("a"), reference("b"))
    with pytest.raises(AgentError, match="the kubelet has not unprepared claim default/b"):
        node.restarted().prepare(reference("c"))
    assert set(node.restarted().prepared) == {reference("a"), reference("b")}


@pytest.mark.parametrize(
    "now", [None, claim("a", GPUS[0], adminAccess=True, uid="new"), claim("a", GPUS[1], adminAccess=True), claim("a")]
)
def test_a_claim_in_the_kubelets_record_is_a_monitor_only_by_its_own_word(
    node: Node, now: dict[str, Any] | None
) -> None:
    node.api |= {"a": now, "b": claim("b", GPUS[0])}
    node.kubelet_has(reference("a"))
    with pytest.raises(AgentError, match="the kubelet has not unprepared claim default/a"):
        node.restarted().prepare(reference("b"))


def test_a_slow_api_server_keeps_nobody_waiting_and_gives_nothing_away(contested: Node) -> None:
    """It is asked whether claim a, which the kubelet has forgotten, still has the GPU that claim b wants."""
    contested.api["c"] = claim("c", GPUS[1])
    asked, answer = threading.Event(), threading.Event()
    fetch, failures = contested.fetch, list[str]()

    def slow(claim: ClaimReference) -> Mapping[str, Any]:
        if claim.name == "a":
            asked.set()
            assert answer.wait(60)
            raise AgentError("no answer")
        return fetch(claim)

    def prepare_slowly() -> None:
        try:
            claims.prepare(reference("b"))
        except AgentError as error:
            failures.append(str(error))

    contested.fetch = slow  # type: ignore[method-assign]
    claims = contested.restarted()
    waiting = threading.Thread(target=prepare_slowly)
    waiting.start()
    assert asked.wait(30)
    with ThreadPoolExecutor(1) as others:
        try:
            # Passes read it: no slice would be published while a claim waits for the API server.
            assert set(others.submit(lambda: claims.prepared).result(10)) == {reference("a")}
            others.submit(claims.prepare, reference("c")).result(10)
            others.submit(claims.unprepare, reference("c")).result(10)
        finally:
            answer.set()
            waiting.join()
    assert failures == ["no answer"]
    assert set(claims.prepared) == {reference("a")}


def test_a_claim_that_is_prepared_again_while_it_is_looked_up_keeps_its_device(contested: Node) -> None:
    fetch, answers = contested.fetch, [NotAllocatedError("gone")]

    def fetch_late(claim: ClaimReference) -> Mapping[str, Any]:
        if claim.name == "a" and answers:
            late = answers.pop()
            claims.prepare(reference("a"))
            raise late
        return fetch(claim)

    contested.fetch = fetch_late  # type: ignore[method-assign]
    claims = contested.restarted()
    with pytest.raises(AgentError, match="allocated to claim default/a too"):
        claims.prepare(reference("b"))
    assert set(claims.prepared) == set(contested.restarted().prepared) == {reference("a")}


@pytest.mark.parametrize(
    ("now", "record"),
    [
        (None, reference("other")),
        (claim("a"), reference("other")),
        (claim("a", GPUS[1]), reference("other")),
        (claim("a", GPUS[0], uid="new"), reference("other")),
        # Users name claims, and can see uids.
        (None, ClaimReference("default", reference("a").uid, "another-uid")),
    ],
)
def test_a_claim_that_nobody_knows_loses_its_device(
    contested: Node, now: dict[str, Any] | None, record: ClaimReference
) -> None:
    """If the kubelet's files were removed, as by `kubeadm reset`, the kubelet never unprepares the claim."""
    contested.api["a"] = now
    contested.kubelet_has(record)
    assert contested.claims.prepare(reference("b"))
    assert set(contested.restarted().prepared) == {reference("b")}


@pytest.mark.parametrize(
    "record",
    ["known", "no file", '{"Claims": {"uid-of-a": {}}}', '{"Data": "{\\"claims\\": [\\"uid-of-a\\"]}"}'],
)
def test_a_device_waits_until_the_kubelet_has_given_it_back(contested: Node, record: str) -> None:
    """A pod that was deleted by force still runs when its claim is gone and its device allocated to another."""
    contested.api["a"] = None
    contested.kubelet_has(reference("a"))
    if record == "no file":
        contested.record.unlink()
        contested.record.mkdir()
    elif record != "known":
        contested.record.write_text(record)
    claims = contested.restarted()
    with pytest.raises(AgentError, match="the kubelet has not unprepared claim default/a"):
        claims.prepare(reference("b"))
    claims.unprepare(reference("a"))
    assert claims.prepare(reference("b"))


@pytest.mark.parametrize(
    ("now", "wrong"),
    [
        ({}, "key metadata is missing"),
        ({"status": []}, "key status must be an object"),
        ({"status": {"allocation": 0}}, "key allocation must be an object"),
        ({"status": {"allocation": {}}}, "key devices is missing"),
        ({"status": {"allocation": {"devices": {"results": [[]]}}}}, "must be an object, not a list"),
        ({"status": claim("a", GPUS[0], adminAccess="yes")["status"]}, "key adminAccess must be a boolean"),
    ],
)
def test_a_malformed_claim_is_not_prepared_and_keeps_its_device(
    contested: Node, now: dict[str, Any], wrong: str
) -> None:
    """What the API server says of it is not that it has no device."""
    contested.api["a"] = {"metadata": {"uid": "uid-of-a"}, **now} if now else now
    for name in ("a", "b"):
        with pytest.raises(AgentError, match=f"^claim default/a.*: {wrong}"):
            contested.claims.prepare(reference(name))
    assert set(contested.restarted().prepared) == {reference("a")}


def test_what_cannot_be_noted_is_not_prepared(node: Node) -> None:
    node.api["a"] = claim("a", GPUS[0])
    node.checkpoint.parent.rename(node.tree / "away")
    node.checkpoint.parent.write_text("a file in the directory's place")
    with pytest.raises(OSError, match="director"):
        node.claims.prepare(reference("a"))
    assert not node.claims.prepared


# The record of prepared claims survives damage, because the kubelet has a record too.


@pytest.mark.parametrize("damage", ["gone", "torn", "changed", "empty", "newer", "directory"])
def test_a_damaged_checkpoint_is_made_again_from_the_kubelets_record(
    contested: Node, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """So that a device that a pod has is not given to another one."""
    prepared, content = contested.claims.prepared, contested.checkpoint.read_bytes()
    changed = {
        "torn": content[: len(content) // 2],
        "changed": content.replace(b"0000-01", b"0000-02"),
        "empty": b"",
        "newer": content.replace(b'"version": 1', b'"version": 2'),
    }
    if damage in changed:
        contested.checkpoint.write_bytes(changed[damage])
    else:
        contested.checkpoint.unlink()
    if damage == "directory":
        contested.checkpoint.mkdir()
    contested.kubelet_has(reference("a"))
    claims = contested.restarted()
    assert claims.prepared == prepared
    assert "1 claims are taken from the kubelet's record" in caplog.text
    with pytest.raises(AgentError, match="cannot have"):
        claims.prepare(reference("b"))


LISTED = '{"Data": "{\\"ClaimInfoStateList\\": %s}"}'


@pytest.mark.parametrize(
    "record", ["", "{}", "[]", '{"Data": 5}', '{"Data": "x"}', '{"Data": "{}"}', LISTED % "[5]", LISTED % "null"]
)
def test_no_record_stops_the_service(node: Node, record: str, caplog: pytest.LogCaptureFixture) -> None:
    """The format is the kubelet's own, and may change. The scheduler is the first guard."""
    node.record.write_text(record)
    assert node.restarted().prepared == {}
    assert ("record is not usable" in caplog.text) == ("; starting without prepared claims" in caplog.text)


def test_the_kubelet_does_not_wait_for_the_disk(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of this process forgets nothing all the same; what is written is soon made durable, once."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    node.api["a"] = claim("a", GPUS[0])
    prepared = node.claims.prepare(reference("a"))
    assert synced == []
    assert node.restarted().prepared == {reference("a"): prepared}
    assert synced == [str(node.checkpoint), str(node.checkpoint.parent)]
