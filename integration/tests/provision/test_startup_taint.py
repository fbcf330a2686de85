"""A startup taint keeps every pod away from a new node until its GPUs are ready; only an administrator can lift it.

A real control plane decides; only the node is simulated: the test writes what its kubelet and the agent would write,
with their identity.
"""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from agent.cli.kube import DIRECTORY
from integration.bed.cluster.control_plane import ADMIN, ControlPlane, node_user
from integration.bed.cluster.node_status import change_node_status
from integration.bed.cluster.stand_in_kubelet import until
from integration.bed.process import CommandError

NODE = "gpu-node"
PODS = 50
PENDING = f"{PODS} pods that the scheduler has refused"
KIND = "GPUReady"
SECONDS = 120
LABEL = {"nvidia.com/gpu.present": "true"}


@pytest.fixture
def cluster() -> Iterator[ControlPlane]:
    with ControlPlane((NODE,)) as control_plane:
        yield control_plane


def test_no_pod_starts_before_the_gpus_are_ready(cluster: ControlPlane) -> None:
    taint = startup_taint()
    register(cluster, taint)
    until("the default service account exists", lambda: bool(names(cluster, "serviceaccounts")))
    cluster.kubectl("create", "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": pods()}))
    until("the startup taint is the only one", lambda: taints(cluster) == [taint["key"]])
    until(PENDING, lambda: refused(cluster) == PODS)
    with pytest.raises(CommandError, match=f'node "{NODE}" is not allowed to modify taints'):
        cluster.kubectl("taint", "node", NODE, removal(taint), user=node_user(NODE))
    lifting = stand_in_for_a_readiness_controller(cluster, taint)
    set_condition(cluster, "False")
    assert (bound(cluster), lifting.poll()) == (0, None)
    assert refused(cluster) == PODS
    set_condition(cluster, "True")
    until("all pods are bound", lambda: bound(cluster) == PODS)
    assert lifting.wait(10) == 0


def startup_taint() -> dict[str, str]:
    """Return the taint that the manifest of the readiness rule names."""
    with open(f"{DIRECTORY}/node-readiness-rule.yaml") as file:
        rule = yaml.safe_load(file)["spec"]
    assert [each["type"] for each in rule["conditions"]] == [KIND]
    assert rule["nodeSelector"]["matchLabels"] == LABEL
    taint: dict[str, str] = rule["taint"]
    return taint


def register(cluster: ControlPlane, taint: dict[str, str]) -> None:
    """Register the node as its kubelet does: with its own identity, labels and taints, and then ready for pods."""
    room = {"cpu": "64", "memory": "64Gi", "pods": "110", "nvidia.com/gpu": "8"}
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE, "labels": LABEL},
        "spec": {"taints": [taint]},
    }
    cluster.kubectl("create", "--filename=-", stdin=json.dumps(node), user=node_user(NODE))

    def change(status: dict[str, Any]) -> None:
        status.update(capacity=room, allocatable=room, conditions=[condition("Ready")])

    change_node_status(cluster, NODE, change)


def condition(kind: str, status: str = "True") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "Test", "message": ""}


def set_condition(cluster: ControlPlane, value: str) -> None:
    """Set the condition as the machine half does."""

    def change(status: dict[str, Any]) -> None:
        others = [each for each in status["conditions"] if each["type"] != KIND]
        status["conditions"] = [*others, condition(KIND, value)]

    change_node_status(cluster, NODE, change)


def stand_in_for_a_readiness_controller(cluster: ControlPlane, taint: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the commands of docs/autoscaling.md, which stand in for the node-readiness-controller."""
    kubeconfig = cluster.write_kubeconfig(ADMIN, cluster.directory / "stand-in.kubeconfig")
    script = f"""
        kubectl wait --for=condition={KIND} --timeout={SECONDS}s node/{NODE} &&
        kubectl taint node {NODE} {removal(taint)}
    """
    # kubectl keeps a cache in $HOME.
    environment = {"PATH": f"{cluster.binaries}:/usr/bin:/bin", "HOME": str(cluster.directory)}
    return subprocess.Popen(["sh", "-c", script], env=environment | {"KUBECONFIG": str(kubeconfig)})


def removal(taint: dict[str, str]) -> str:
    return f"{taint['key']}:{taint['effect']}-"


def pods() -> list[dict[str, Any]]:
    container = {"name": "main", "image": "registry.invalid/never-pulled"}
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": {"containers": [container]}}
        for number in range(PODS)
    ]


def names(cluster: ControlPlane, kind: str) -> str:
    return cluster.kubectl("get", kind, "--output=name")


def taints(cluster: ControlPlane) -> list[str]:
    """Return the keys of the node's taints. A new node also has some of the control plane's own."""
    spec = json.loads(cluster.kubectl("get", "node", NODE, "--output=json"))["spec"]
    return [each["key"] for each in spec.get("taints", ())]


def bound(cluster: ControlPlane) -> int:
    return sum(each["spec"].get("nodeName") == NODE for each in listed(cluster))


def refused(cluster: ControlPlane) -> int:
    """Return how many pods the scheduler has refused because of a taint."""
    return sum(
        "untolerated taint" in each.get("message", "")
        for pod in listed(cluster)
        for each in pod["status"].get("conditions", ())
    )


def listed(cluster: ControlPlane) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cluster.kubectl("get", "pods", "--output=json"))["items"]
    return found
