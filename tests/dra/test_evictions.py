"""Pods that asked by extended resource are evicted from a GPU that is being detached."""

from typing import Any

import pytest

from agent.dra.claims import EXTENDED, ClaimReference, Evictions, Pod, PreparedDevice, pods_of
from agent.dra.inventory import Device, Taint
from agent.model.contract import Effect
from agent.model.errors import AgentError, DocumentError
from agent.system.api_server import ApiError, NotFoundError

CLAIM, OTHER = ClaimReference("team", "train-gpu", "c1"), ClaimReference("team", "by-hand", "c2")
POD = Pod("team", "train", "p1")
EVICT, KEEP = Effect.NO_EXECUTE, Effect.NO_SCHEDULE


def device(name: str, effect: Effect | None) -> Device:
    taints = (Taint("gpu.unbounded-agent.io/draining", "Detaching", effect),) if effect else ()
    return Device(name, "vendor", (f"vendor.com/gpu={name}",), "0000:01:00.0", taints=taints)


def prepared(name: str, *, admin: bool = False) -> tuple[PreparedDevice, ...]:
    return (PreparedDevice(("gpu",), "kube1", name, (f"vendor.com/gpu={name}",), admin=admin),)


DETACHED, HELD = [device("gpu-1", EVICT)], {CLAIM: prepared("gpu-1")}


def document(uid: str = "c1", *, pod: str = "train", extended: bool = True, **status: Any) -> dict[str, Any]:  # noqa: ANN401
    annotations = {EXTENDED: "true"} if extended else {}
    consumers = [{"resource": "pods", "name": pod, "uid": f"p{uid[1:]}"}]
    return {"metadata": {"uid": uid, "annotations": annotations}, "status": {"reservedFor": consumers, **status}}


class Cluster:
    """An API server."""

    def __init__(self) -> None:
        self.claims: dict[ClaimReference, dict[str, Any]] = {CLAIM: document(), OTHER: document("c2", extended=False)}
        self.sent: list[tuple[str, str, Any]] = []
        self.refusal: AgentError | None = None

    def fetch(self, claim: ClaimReference) -> dict[str, Any]:
        if claim not in self.claims:
            raise AgentError("404")
        return self.claims[claim]

    def send(self, method: str, path: str, content: object) -> None:
        self.sent.append((method, path, content))
        if self.refusal:
            raise self.refusal

    def evict(self) -> tuple[Pod, ...]:
        """Make a new process's first attempt: CLAIM has a GPU that is being detached."""
        return Evictions(self.fetch, self.send).make(DETACHED, HELD)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_the_pod_is_evicted_with_its_uid(cluster: Cluster) -> None:
    assert cluster.evict() == (POD,)
    ((method, path, content),) = cluster.sent
    assert (method, path) == ("POST", "/api/v1/namespaces/team/pods/train/eviction")
    assert content["metadata"] == {"namespace": "team", "name": "train"}
    assert content["deleteOptions"] == {"preconditions": {"uid": "p1"}}


def test_pods_of_other_gpus_and_of_claims_by_hand_stay(cluster: Cluster) -> None:
    """Claims may tolerate the taint, and Kubernetes evicts their pods itself."""
    found = Evictions(cluster.fetch, cluster.send)
    devices = [*DETACHED, device("gpu-2", KEEP), device("gpu-3", None)]
    for claims in (
        {CLAIM: prepared("gpu-2")},
        {CLAIM: prepared("gpu-3")},
        {CLAIM: prepared("gpu-1", admin=True)},
        {OTHER: prepared("gpu-1")},
        {},
    ):
        assert found.make(devices, claims) == ()
    assert cluster.sent == []


def test_a_refusal_is_logged_once_and_tried_again(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """A disruption budget may forbid it for a while."""
    cluster.refusal = AgentError("429 Too Many Requests: disruption budget")
    found = Evictions(cluster.fetch, cluster.send)
    for _ in range(3):
        assert found.make(DETACHED, HELD) == (POD,)
    assert [record.message for record in caplog.records] == [
        "pod team/train cannot be evicted yet: 429 Too Many Requests: disruption budget"
    ]
    cluster.refusal = None
    found.make(DETACHED, HELD)
    assert caplog.records[-1].message == "pod team/train is evicted: its GPU is being detached"


def test_an_api_server_that_is_away_is_asked_once(cluster: Cluster) -> None:
    """Each request may take many seconds, in which no slice and no status is written. A next attempt follows soon."""
    claims = {ClaimReference("team", f"train-{number}", f"c{number}"): prepared("gpu-1") for number in range(9)}
    asked: list[ClaimReference] = []

    def fetch(claim: ClaimReference) -> dict[str, Any]:
        asked.append(claim)
        if len(asked) > 2:
            raise ApiError("GET claim", "no answer")
        return document(claim.uid, pod=claim.name)

    assert len(Evictions(fetch, cluster.send).make(DETACHED, claims)) == 2
    assert (len(asked), len(cluster.sent)) == (3, 2)


def test_one_pod_without_an_answer_keeps_no_other(cluster: Cluster) -> None:
    """An admission webhook may hold up the eviction of one pod each time, until the request has lasted too long.

    So each attempt asks for one eviction, and the next one begins with the other pod.
    """
    second = ClaimReference("team", "train-more", "c3")
    cluster.claims[second] = document("c3", pod="more")
    evictions = Evictions(cluster.fetch, cluster.send)
    cluster.refusal = ApiError("POST eviction", "no answer")
    for _ in range(5):
        evictions.make(DETACHED, {**HELD, second: prepared("gpu-1")})
    assert [path.split("/")[-2] for _, path, _ in cluster.sent] == ["train", "more", "train", "more", "train"]


def test_a_pod_that_has_ended_is_no_warning(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """The kubelet gives the claim back a little later."""
    cluster.refusal = NotFoundError("POST eviction", '404 Not Found: pods "train" not found', 404)
    cluster.evict()
    assert caplog.records == []


def test_a_claim_that_is_gone_or_was_made_again_evicts_nobody(cluster: Cluster) -> None:
    cluster.claims = {}
    assert cluster.evict() == ()
    assert pods_of(CLAIM, document("c9")) == ()
    assert pods_of(CLAIM, document(reservedFor=None)) == ()
    assert pods_of(CLAIM, document(reservedFor=[{"resource": "other", "name": "x", "uid": "y"}])) == ()


@pytest.mark.parametrize("consumers", ["x", [7], [{"resource": "pods"}], [{"resource": "pods", "name": "", "uid": ""}]])
def test_a_malformed_claim_is_refused(cluster: Cluster, consumers: object) -> None:
    with pytest.raises(DocumentError, match="claim team/train-gpu"):
        pods_of(CLAIM, document(reservedFor=consumers))
    cluster.claims[CLAIM] = document(reservedFor=consumers)
    assert cluster.evict() == ()
