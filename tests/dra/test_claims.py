"""Claims are prepared as the API server has them, of devices that are there, and no device for two claims."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.dra.claims import RECORD_NAME, ClaimReference, NotAllocatedError, PreparedDevice
from agent.dra.inventory import Device
from agent.model.errors import AgentError
from agent.model.paths import DRA_DRIVER
from tests.fakes.dra_node import GPUS, KUBELET, NODE, PARTITION, Node, claim, reference


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_claim_gets_its_devices(node: Node) -> None:
    """Other drivers' devices do not count. A container names the request, not the alternative that was chosen."""
    node.api["a"] = claim("a", *GPUS, request="gpu/large")
    results = node.api["a"]["status"]["allocation"]["devices"]["results"]
    results.insert(0, {"request": "nic", "driver": "nic.example", "pool": "other", "device": "nic0"})
    prepared = node.claims.prepare(reference("a"))
    assert prepared == tuple(PreparedDevice(("gpu",), NODE, gpu, (f"vendor.com/gpu={gpu}",)) for gpu in GPUS)
    assert node.checkpoint.stat().st_mode & 0o777 == 0o600
    assert node.claims.prepare(reference("a")) == prepared
    assert node.restarted().prepared == {reference("a"): prepared}


@pytest.mark.parametrize(("driver", "refused"), [(DRA_DRIVER, True), ("nic.example", False)])
def test_parameters_are_refused(node: Node, driver: str, refused: bool) -> None:
    """The driver takes none. Those for other drivers are none of its business, and other kinds may come."""
    node.api["a"] = claim("a", GPUS[0])
    config = [{"source": "FromClaim", "opaque": {"driver": driver, "parameters": {}}}, {"source": "FromClass"}]
    node.api["a"]["status"]["allocation"]["devices"]["config"] = config
    if refused:
        with pytest.raises(AgentError, match="which takes none"):
            node.claims.prepare(reference("a"))
    else:
        assert node.claims.prepare(reference("a"))


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (claim("a", GPUS[0], uid="other"), "deleted and made again"),
        (claim("a"), "is not allocated"),
        (claim("a", GPUS[0], pool="node2"), "allocated in the pool node2"),
        (claim("a", GPUS[0], driver="other.example"), "no device of the driver"),
        (claim("a", "gpu-0000-09-00-0"), "no device gpu-0000-09-00-0 now"),
        (claim("a", GPUS[0], "gpu-0000-09-00-0"), "no device gpu-0000-09-00-0 now"),
        ({}, "key metadata is missing"),
        ({"metadata": {"uid": "uid-of-a"}, "status": []}, "key status must be an object"),
        ({"metadata": {"uid": "uid-of-a"}, "status": {"allocation": 0}}, "key allocation must be an object"),
        ({"metadata": {"uid": "uid-of-a"}, "status": {"allocation": {"devices": {"results": [[]]}}}}, "an object"),
        (claim("a", GPUS[0], adminAccess="yes"), "key adminAccess must be a boolean"),
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
    node.api["a"], node.api["b"] = claim("a", GPUS[0], adminAccess=True), claim("b", GPUS[0])
    node.api["c"] = claim("c", GPUS[0])
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
    if now is not None:
        node.api["a"] = now
    node.api["b"] = claim("b", GPUS[0])
    node.kubelet_has(reference("a"))
    with pytest.raises(AgentError, match="the kubelet has not unprepared claim default/a"):
        node.restarted().prepare(reference("b"))


def test_a_slow_api_server_keeps_nobody_waiting_and_gives_nothing_away(node: Node) -> None:
    """It is asked whether claim a, which the kubelet has forgotten, still has the GPU that claim b wants."""
    node.api["a"], node.api["b"], node.api["c"] = claim("a", GPUS[0]), claim("b", GPUS[0]), claim("c", GPUS[1])
    node.claims.prepare(reference("a"))
    asked, answer, prepared = threading.Event(), threading.Event(), threading.Event()
    fetch, seen, failures = node.fetch, list[set[ClaimReference]](), list[str]()

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

    def prepare_others() -> None:
        # Passes read it: no slice would be published while a claim waits for the API server.
        seen.append(set(claims.prepared))
        claims.prepare(reference("c"))
        claims.unprepare(reference("c"))
        prepared.set()

    node.fetch = slow  # type: ignore[method-assign]
    claims = node.restarted()
    threads = threading.Thread(target=prepare_slowly), threading.Thread(target=prepare_others)
    threads[0].start()
    assert asked.wait(30)
    threads[1].start()
    in_time = prepared.wait(10)
    answer.set()
    for each in threads:
        each.join()
    assert (in_time, seen, failures) == (True, [{reference("a")}], ["no answer"])
    assert set(claims.prepared) == {reference("a")}


def test_a_claim_that_is_prepared_again_while_it_is_looked_up_keeps_its_device(node: Node) -> None:
    node.api["a"], node.api["b"] = claim("a", GPUS[0]), claim("b", GPUS[0])
    node.claims.prepare(reference("a"))
    fetch, answers = node.fetch, [NotAllocatedError("gone")]

    def fetch_late(claim: ClaimReference) -> Mapping[str, Any]:
        if claim.name == "a" and answers:
            late = answers.pop()
            claims.prepare(reference("a"))
            raise late
        return fetch(claim)

    node.fetch = fetch_late  # type: ignore[method-assign]
    claims = node.restarted()
    with pytest.raises(AgentError, match="allocated to claim default/a too"):
        claims.prepare(reference("b"))
    assert set(claims.prepared) == {reference("a")}
    assert set(node.restarted().prepared) == {reference("a")}


def test_a_claim_that_is_named_like_another_claims_uid_keeps_no_device(node: Node) -> None:
    """Users name claims, and can see uids."""
    node.api["a"], node.api["b"] = claim("a", GPUS[0]), claim("b", GPUS[0])
    node.claims.prepare(reference("a"))
    del node.api["a"]
    node.kubelet_has(ClaimReference("default", reference("a").uid, "another-uid"))
    assert node.claims.prepare(reference("b"))


@pytest.mark.parametrize(
    "record", [None, '{"Claims": {"uid-of-a": {}}}', '{"Data": "{\\"claims\\": [\\"uid-of-a\\"]}"}']
)
def test_a_claim_in_a_record_that_cannot_be_understood_keeps_its_device(node: Node, record: str | None) -> None:
    node.api["a"], node.api["b"] = claim("a", GPUS[0]), claim("b", GPUS[0])
    node.claims.prepare(reference("a"))
    del node.api["a"]
    place = node.tree / KUBELET[1:] / RECORD_NAME
    if record:
        place.write_text(record)
    else:
        place.mkdir()
    with pytest.raises(AgentError, match="the kubelet has not unprepared claim default/a"):
        node.claims.prepare(reference("b"))


def test_a_device_waits_until_the_kubelet_has_given_it_back(node: Node) -> None:
    """A pod that was deleted by force still runs when its claim is gone and its device allocated to another."""
    node.api["a"] = claim("a", GPUS[0])
    node.claims.prepare(reference("a"))
    node.kubelet_has(reference("a"))
    del node.api["a"]
    node.api["b"] = claim("b", GPUS[0])
    for claims in (node.claims, node.restarted()):
        with pytest.raises(AgentError, match="the kubelet has not unprepared claim default/a"):
            claims.prepare(reference("b"))
    node.claims.unprepare(reference("a"))
    assert node.claims.prepare(reference("b"))


@pytest.mark.parametrize("now", [None, claim("a"), claim("a", GPUS[1]), claim("a", GPUS[0], uid="new")])
def test_a_claim_that_nobody_knows_loses_its_device(node: Node, now: dict[str, Any] | None) -> None:
    """If the kubelet's files were removed, as by `kubeadm reset`, the kubelet never unprepares the claim."""
    node.api["a"] = claim("a", GPUS[0])
    node.claims.prepare(reference("a"))
    node.api["b"] = claim("b", GPUS[0])
    node.kubelet_has(reference("other"))
    if now is None:
        del node.api["a"]
    else:
        node.api["a"] = now
    assert node.claims.prepare(reference("b"))
    assert set(node.restarted().prepared) == {reference("b")}


@pytest.mark.parametrize(
    ("now", "key"),
    [
        ({}, "metadata"),
        ({"metadata": {"uid": "uid-of-a"}, "status": []}, "status"),
        ({"metadata": {"uid": "uid-of-a"}, "status": {"allocation": {}}}, "devices"),
        (claim("a", GPUS[0], adminAccess="yes"), "adminAccess"),
    ],
)
def test_a_malformed_claim_keeps_its_device(node: Node, now: dict[str, Any], key: str) -> None:
    """What the API server says of it is not that it has no device."""
    node.api["a"], node.api["b"] = claim("a", GPUS[0]), claim("b", GPUS[0])
    node.claims.prepare(reference("a"))
    node.api["a"] = now
    with pytest.raises(AgentError, match=f"^claim default/a.*: key {key} "):
        node.claims.prepare(reference("b"))
    assert set(node.restarted().prepared) == {reference("a")}


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
def test_no_record_stops_the_service(node: Node, record: str, caplog: pytest.LogCaptureFixture) -> None:
    """The format is the kubelet's own, and may change. The scheduler is the first guard."""
    (node.tree / KUBELET[1:] / RECORD_NAME).write_text(record)
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
