"""What a kubelet's own identity may do for `gpus detach`: evict pods of its node, and no others. Without a machine.

The API server, its node authorizer and NodeRestriction are real. The nodes have no kubelet, so pods that are
asked to end stay.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from agent.dra.claims import EXTENDED, ClaimReference, Evictions, Pod, PreparedDevice
from agent.dra.inventory import Device, Taint
from agent.model.contract import Effect
from agent.model.errors import AgentError
from integration.bed.cluster.control_plane import ControlPlane, node_user
from integration.bed.process import CommandError

pytestmark = pytest.mark.usefixtures("record_release")

NODE, OTHER = "kube1", "kube2"
GPU = Device("gpu-1", "vendor", ("vendor.com/gpu=1",), "0000:01:00.0", taints=(Taint("a/b", "", Effect.NO_EXECUTE),))
PREPARED = (PreparedDevice(("gpu",), NODE, "gpu-1", GPU.cdi_names),)


@pytest.fixture(scope="module")
def control_plane(release: str) -> Iterator[ControlPlane]:
    with ControlPlane((NODE, OTHER), controllers=False, release=release) as control_plane:
        control_plane.kubectl("create", "serviceaccount", "default")
        for name in (NODE, OTHER):
            _make(control_plane, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
        yield control_plane


def _make(control_plane: ControlPlane, content: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(
        control_plane.kubectl("create", "--output=json", "--filename=-", stdin=json.dumps(content))
    )
    return made


def pod(control_plane: ControlPlane, name: str, node: str) -> Pod:
    spec = {"nodeName": node, "containers": [{"name": "main", "image": "registry.invalid/pause"}]}
    made = _make(control_plane, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    return Pod("default", name, made["metadata"]["uid"])


def evict(control_plane: ControlPlane, which: Pod) -> list[str]:
    """Evict the pod with the identity of NODE's kubelet, and return what was refused."""
    refused: list[str] = []

    def fetch(claim: ClaimReference) -> dict[str, Any]:
        consumers = [{"resource": "pods", "name": which.name, "uid": which.uid}]
        metadata = {"uid": claim.uid, "annotations": {EXTENDED: "true"}}
        return {"metadata": metadata, "status": {"reservedFor": consumers}}

    def send(method: str, path: str, content: object) -> None:
        try:
            control_plane.kubectl(
                "create", f"--raw={path}", "--filename=-", stdin=json.dumps(content), user=node_user(NODE)
            )
        except CommandError as error:
            refused.append(str(error))
            raise AgentError(str(error)) from error

    assert Evictions(fetch, send).make([GPU], {ClaimReference("default", "claim", "c1"): PREPARED}) == (which,)
    return refused


def ending(control_plane: ControlPlane) -> list[str]:
    """Return the pods that were asked to end."""
    found = json.loads(control_plane.kubectl("get", "pods", "--output=json"))
    metadata = (each["metadata"] for each in found["items"])
    return [each["name"] for each in metadata if "deletionTimestamp" in each]


def test_a_kubelet_may_evict_only_pods_of_its_node(control_plane: ControlPlane) -> None:
    mine, theirs = pod(control_plane, "mine", NODE), pod(control_plane, "theirs", OTHER)
    (refused,) = evict(control_plane, theirs)
    assert "can only evict pods with spec.nodeName set to itself" in refused
    assert evict(control_plane, mine) == []
    assert ending(control_plane) == ["mine"]


def test_a_new_pod_of_the_same_name_stays(control_plane: ControlPlane) -> None:
    again = pod(control_plane, "again", NODE)
    (refused,) = evict(control_plane, Pod("default", "again", "another-uid"))
    assert "the UID in the precondition" in refused
    assert again.name not in ending(control_plane)


def test_a_disruption_budget_is_respected(control_plane: ControlPlane) -> None:
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "all"},
        "spec": {"minAvailable": 1, "selector": {}},
    }
    _make(control_plane, budget)
    kept = pod(control_plane, "kept", NODE)
    # A pod that does not run yet is not counted by budgets (canIgnorePDB of the registry of pods).
    status = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
    control_plane.kubectl("patch", "pod", "kept", "--subresource=status", f"--patch={json.dumps(status)}")
    (refused,) = evict(control_plane, kept)
    assert "disruption budget" in refused
    assert kept.name not in ending(control_plane)
