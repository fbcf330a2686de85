"""A startup taint keeps every pod away from a new node until its GPUs are ready; only an administrator can lift it.

A real control plane decides. The taint is the one that the agent gives to the kubelet, and the machine half sets the
condition that the page's commands wait for. Only the kubelet is simulated: the test registers the node in its place.
"""

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.config.settings import KubeletSettings
from agent.host.allocation import DIRECTORY
from agent.host.provision.node_files import taints as registered_taints
from agent.model.conditions import ConditionType, Reason, false, true
from integration.bed.cache import REPOSITORY
from integration.bed.cluster.control_plane import ADMIN, ControlPlane, node_user
from integration.bed.cluster.node_status import change_node_status
from integration.bed.cluster.stand_in_kubelet import until
from integration.bed.machine.node_namespace import NodeNamespace
from integration.bed.process import CommandError

NODE = "gpu-node"
PODS = 50
PENDING = f"{PODS} pods that the scheduler has refused"
KIND = "GPUReady"
SECONDS = 120
KUBELETS_OWN = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
LABEL = {"nvidia.com/gpu.present": "true"}
READY = true(ConditionType.READY, Reason.ALL_CONDITIONS_TRUE, "the machine can run GPU workloads")
NOT_READY = false(ConditionType.READY, Reason.MODULE_NOT_LOADED, "DriverLoaded: the driver is not loaded")
PAGE = (REPOSITORY / "docs/bootstrap.md").read_text().partition("\n## Startup taint\n")[2].partition("\n## ")[0]


@pytest.fixture
def cluster() -> Iterator[ControlPlane]:
    with ControlPlane((NODE,)) as control_plane:
        yield control_plane


@pytest.fixture
def machine(cluster: ControlPlane, tmp_path: Path) -> NodeNamespace:
    return NodeNamespace(tmp_path / "machine", cluster.binaries / "kubectl")


def test_no_pod_starts_before_the_gpus_are_ready(cluster: ControlPlane, machine: NodeNamespace, tmp_path: Path) -> None:
    kubeconfig = f"--kubeconfig={cluster.write_kubeconfig(node_user(NODE), tmp_path / 'kubelet.conf')}"
    taint = startup_taint()
    assert rule_taint() == taint
    register(cluster, taint)
    until("the default service account exists", lambda: bool(names(cluster, "serviceaccounts")))
    cluster.kubectl("create", "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": pods()}))
    until("the startup taint is the only one", lambda: taints(cluster) == [taint["key"]])
    until(PENDING, lambda: refused(cluster) == PODS)
    with pytest.raises(CommandError, match=f'node "{NODE}" is not allowed to modify taints'):
        cluster.kubectl("taint", "node", NODE, removal(taint), user=node_user(NODE))
    lifting = stand_in_for_a_readiness_controller(cluster)
    machine.publish_status(NOT_READY)
    machine.run(kubeconfig)
    assert gpu_ready(cluster) == ("False", NOT_READY.reason)
    assert (bound(cluster), lifting.poll()) == (0, None)
    assert refused(cluster) == PODS
    machine.publish_status(READY)
    machine.run(kubeconfig)
    assert gpu_ready(cluster) == ("True", READY.reason)
    until("all pods are bound", lambda: bound(cluster) == PODS)
    assert lifting.wait(10) == 0


def startup_taint() -> dict[str, str]:
    """Return the taint with which the agent lets the kubelet register, given the page's configuration."""
    text = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert text
    kubelet = tomllib.loads(text[1])["machines"]["gpu-node"]["node"]["kubelet"]
    (taint,) = registered_taints(KubeletSettings.validated(kubelet))
    return taint


def rule_taint() -> dict[str, str]:
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
        status.update(capacity=room, allocatable=room, conditions=[KUBELETS_OWN])

    change_node_status(cluster, NODE, change)


def gpu_ready(cluster: ControlPlane) -> tuple[str, str]:
    """Return status and reason of the node's condition GPUReady."""
    node = json.loads(cluster.kubectl("get", "node", NODE, "--output=json"))
    (found,) = (each for each in node["status"]["conditions"] if each["type"] == KIND)
    return found["status"], found["reason"]


def stand_in_for_a_readiness_controller(cluster: ControlPlane) -> subprocess.Popen[bytes]:
    """Start the commands of docs/bootstrap.md#startup-taint, which stand in for the node-readiness-controller."""
    kubeconfig = cluster.write_kubeconfig(ADMIN, cluster.directory / "stand-in.kubeconfig")
    commands = re.findall(r"^ *(kubectl (?:wait|taint) .*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    script = " && ".join(commands).replace("NODE", NODE).replace("15m", f"{SECONDS}s")
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
