"""The drain of a node by itself, on a real API server: with a kubelet's identity, NodeRestriction and kubectl.

No virtual machine is needed: integration/bed/machine/node_namespace.py says what stands in for the machine. There is no
kubelet that ends pods, so the test deletes those that were asked to end.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.dra.claims import ClaimReference, PreparedDevice
from agent.model.conditions import ConditionType, Reason, true
from agent.model.contract import FencedGpu, LeaveTask, slice_name
from agent.model.paths import CORDONED_FOR, CORDONED_TO_LEAVE, DRA_DRIVER
from integration.bed.cluster.control_plane import ControlPlane, node_user
from integration.bed.machine.node_namespace import NodeNamespace
from integration.bed.process import CommandError

pytestmark = [pytest.mark.scenario("003"), pytest.mark.usefixtures("record_release")]

NODE, OTHER, GPU = "gpu-node", "other-node", "0000:01:00.0"
CLAIMS = "resourceclaims.resource.k8s.io"
GOOD = true(ConditionType.READY, Reason.ALL_CONDITIONS_TRUE, "the machine can run GPU workloads")
RUNS = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}


@pytest.fixture(scope="module")
def control_plane(release: str) -> Iterator[ControlPlane]:
    with ControlPlane([NODE, OTHER], controllers=False, release=release) as control_plane:
        control_plane.kubectl("create", "serviceaccount", "default")
        yield control_plane


@pytest.fixture
def nodes(control_plane: ControlPlane) -> Iterator[None]:
    for name in (NODE, OTHER):
        make(control_plane, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    yield
    every = f"pods,poddisruptionbudgets,{CLAIMS}"
    control_plane.kubectl("delete", every, "--all", "--force", "--grace-period=0")
    control_plane.kubectl("delete", "node", NODE, OTHER)


@pytest.fixture
def machine(control_plane: ControlPlane, tmp_path: Path) -> NodeNamespace:
    return NodeNamespace(tmp_path / "machine", control_plane.binaries / "kubectl")


@pytest.fixture
def kubeconfig(control_plane: ControlPlane, tmp_path: Path) -> str:
    """The option that names the kubeconfig of NODE's kubelet."""
    return f"--kubeconfig={control_plane.write_kubeconfig(node_user(NODE), tmp_path / 'kubelet.conf')}"


def make(control_plane: ControlPlane, content: dict[str, Any]) -> None:
    control_plane.kubectl("create", "--filename=-", stdin=json.dumps(content))


def pod(
    control_plane: ControlPlane, name: str, node: str = NODE, phase: str = "Running", owner: str = "", **more: object
) -> None:
    spec = {"nodeName": node, "containers": [{"name": "main", "image": "registry.invalid/pause"}], **more}
    owners = [{"apiVersion": "apps/v1", "kind": owner, "name": "x", "uid": "1", "controller": True}] if owner else []
    about = {"name": name, "labels": {"app": name}, "ownerReferences": owners}
    make(control_plane, {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec})
    # A pod that does not run yet is not counted by budgets (canIgnorePDB of the registry of pods).
    status = {"status": {**RUNS["status"], "phase": phase}}
    control_plane.kubectl("patch", "pod", name, "--subresource=status", f"--patch={json.dumps(status)}")


def budget(control_plane: ControlPlane, name: str, allowed: int) -> None:
    """Make a budget for the pods of this name. The controller that counts pods does not run: the test does."""
    about = {"metadata": {"name": name}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": name}}}}
    make(control_plane, {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", **about})
    allow(control_plane, name, allowed)


def allow(control_plane: ControlPlane, name: str, allowed: int) -> None:
    counts = {"currentHealthy": 1 + allowed, "desiredHealthy": 1, "expectedPods": 1 + allowed}
    status = {"status": {**counts, "disruptionsAllowed": allowed, "observedGeneration": 1}}
    control_plane.kubectl("patch", "pdb", name, "--subresource=status", "--type=merge", f"--patch={json.dumps(status)}")


def pods(control_plane: ControlPlane) -> dict[str, bool]:
    """Return whether each pod was asked to end."""
    found = json.loads(control_plane.kubectl("get", "pods", "--output=json"))["items"]
    return {each["metadata"]["name"]: "deletionTimestamp" in each["metadata"] for each in found}


def node(control_plane: ControlPlane) -> tuple[bool, dict[str, str]]:
    found = json.loads(control_plane.kubectl("get", "node", NODE, "--output=json"))
    return bool(found["spec"].get("unschedulable")), found["metadata"].get("annotations", {})


@pytest.fixture
def kubelet(control_plane: ControlPlane) -> Iterator[None]:
    """Ends pods that were asked to, as a kubelet does."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.5):
            for name, ends in pods(control_plane).items():
                if ends:
                    control_plane.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--ignore-not-found")

    thread = threading.Thread(target=work)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.usefixtures("nodes", "kubelet")
def test_all_pods_but_those_that_belong_to_the_node_leave_and_the_node_is_cordoned(
    control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str, measured: Callable[[str, object], None]
) -> None:
    pod(control_plane, "replica", owner="ReplicaSet")
    pod(control_plane, "alone")
    pod(control_plane, "daemon", owner="DaemonSet")
    pod(control_plane, "finished", phase="Succeeded")
    pod(control_plane, "elsewhere", OTHER)
    before = time.monotonic()
    answer = machine.leave(LeaveTask.DRAIN, kubeconfig, seconds=60)
    measured("seconds to drain", f"{time.monotonic() - before:.1f}")
    assert (answer["end"], answer["message"], answer["pods"]) == ("done", f"node {NODE} is drained", 0), answer
    assert set(pods(control_plane)) == {"daemon", "finished", "elsewhere"}
    assert node(control_plane) == (True, {CORDONED_TO_LEAVE: "drain"})
    assert machine.leave(LeaveTask.UNCORDON, kubeconfig)["end"] == "done"
    assert node(control_plane) == (False, {})


@pytest.mark.usefixtures("nodes", "kubelet")
def test_a_budget_is_obeyed_until_the_limit_and_named(
    control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str
) -> None:
    pod(control_plane, "kept")
    pod(control_plane, "free")
    budget(control_plane, "kept", 0)
    answer = machine.leave(LeaveTask.DRAIN, kubeconfig, seconds=12)
    assert (answer["end"], answer["pods"]) == ("failed", 1), answer
    (waiting,) = answer["waiting"]
    assert waiting.startswith("default/kept: ")
    assert "disruption budget kept" in waiting
    assert pods(control_plane) == {"kept": False}
    allow(control_plane, "kept", 1)
    assert machine.leave(LeaveTask.DRAIN, kubeconfig, seconds=60)["end"] == "done"
    assert pods(control_plane) == {}
    assert node(control_plane) == (True, {CORDONED_TO_LEAVE: "drain"})


def given(control_plane: ControlPlane, name: str, device: str) -> ClaimReference:
    """Make a pod with a claim, and allocate the device to it, as the scheduler does."""
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu"}}
    claim = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}}
    make(control_plane, {**claim, "spec": {"devices": {"requests": [request]}}})
    pod(control_plane, name, resourceClaims=[{"name": "gpu", "resourceClaimName": name}])
    uids = (control_plane.kubectl("get", kind, name, "--output=jsonpath={.metadata.uid}") for kind in (CLAIMS, "pod"))
    claim_uid, pod_uid = uids
    allocated = {"request": "gpu", "driver": DRA_DRIVER, "pool": NODE, "device": device}
    consumer = {"resource": "pods", "name": name, "uid": pod_uid}
    status = {"status": {"allocation": {"devices": {"results": [allocated]}}, "reservedFor": [consumer]}}
    control_plane.kubectl(
        "patch", CLAIMS, name, "--subresource=status", "--type=merge", f"--patch={json.dumps(status)}"
    )
    return ClaimReference("default", name, claim_uid)


@pytest.mark.usefixtures("nodes", "kubelet")
def test_only_the_pods_of_one_gpu_are_evicted_and_a_budget_keeps_them(
    control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str, measured: Callable[[str, object], None]
) -> None:
    names = {"kept": GPU, "free": GPU, "other": "0000:02:00.0"}
    prepared = {
        given(control_plane, name, slice_name(gpu)): (PreparedDevice(("gpu",), NODE, slice_name(gpu), ("x/y=z",)),)
        for name, gpu in names.items()
    }
    pod(control_plane, "without")
    machine.give(GPU, prepared)
    budget(control_plane, "kept", 0)
    answer = machine.leave(LeaveTask.EVICT, kubeconfig, seconds=8, gpus=(GPU,))
    assert (answer["end"], answer["message"]) == ("failed", f"pods are left on {GPU}"), answer
    assert ["disruption budget kept" in each for each in answer["waiting"]] == [True]
    assert pods(control_plane) == dict.fromkeys(("kept", "other", "without"), False)
    allow(control_plane, "kept", 1)
    before = time.monotonic()
    answer = machine.leave(LeaveTask.EVICT, kubeconfig, seconds=60, gpus=(GPU,))
    measured("seconds to evict the pods of one GPU", f"{time.monotonic() - before:.1f}")
    assert (answer["end"], answer["message"]) == ("done", f"no pod has {GPU}"), answer
    assert pods(control_plane) == dict.fromkeys(("other", "without"), False)
    assert node(control_plane) == (False, {})


@pytest.mark.usefixtures("nodes")
def test_neither_cordon_lifts_the_other_one(
    control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str
) -> None:
    machine.offer(GPU)
    machine.publish_status(GOOD, fenced=(FencedGpu(GPU, "Xid48"),))
    machine.run(kubeconfig)
    assert node(control_plane) == (True, {CORDONED_FOR: f"{GPU}=Xid48"})
    assert machine.leave(LeaveTask.DRAIN, kubeconfig)["end"] == "done"
    # The GPU recovers during the drain, and another is fenced before the uncordon.
    machine.publish_status(GOOD)
    machine.run(kubeconfig)
    assert node(control_plane) == (True, {CORDONED_TO_LEAVE: "drain"})
    machine.publish_status(GOOD, fenced=(FencedGpu(GPU, "Xid48"),))
    assert "stays cordoned" in machine.leave(LeaveTask.UNCORDON, kubeconfig)["message"]
    assert node(control_plane) == (True, {CORDONED_FOR: "start"})
    machine.run(kubeconfig)
    assert node(control_plane) == (True, {CORDONED_FOR: f"{GPU}=Xid48"})
    machine.publish_status(GOOD)
    machine.run(kubeconfig)
    assert node(control_plane) == (False, {})


@pytest.mark.usefixtures("nodes")
def test_a_new_root_ends_the_cordon_that_another_one_has_made(
    control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str, tmp_path: Path
) -> None:
    machine.offer(GPU)
    fenced = (FencedGpu(GPU, "Xid48"),)
    machine.publish_status(GOOD, fenced=fenced)
    machine.run(kubeconfig)
    rebuilt = NodeNamespace(tmp_path / "rebuilt", control_plane.binaries / "kubectl")
    rebuilt.boot_first()
    rebuilt.grant(GPU)
    rebuilt.publish_status(GOOD, fenced=fenced)
    rebuilt.run(kubeconfig)
    assert node(control_plane) == (True, {CORDONED_FOR: f"{GPU}=Xid48"}), "its device plugin has not started yet"
    rebuilt.publish_status(GOOD)
    rebuilt.run(kubeconfig)
    assert node(control_plane) == (False, {})


@pytest.mark.usefixtures("nodes")
def test_a_cordon_of_somebody_else_stays(control_plane: ControlPlane, machine: NodeNamespace, kubeconfig: str) -> None:
    control_plane.kubectl("cordon", NODE)
    assert machine.leave(LeaveTask.DRAIN, kubeconfig)["end"] == "done"
    assert machine.leave(LeaveTask.UNCORDON, kubeconfig)["end"] == "done"
    assert node(control_plane) == (True, {})


@pytest.mark.usefixtures("nodes")
def test_a_node_may_read_where_the_volumes_of_its_own_pods_are_and_no_others(control_plane: ControlPlane) -> None:
    """So it can say which files another root would not have."""
    size = {"storage": "1Mi"}
    for name, on in (("mine", NODE), ("theirs", OTHER)):
        volume = {"capacity": size, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": f"/srv/{name}"}}
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": size}, "storageClassName": ""}
        for kind, spec in (
            ("PersistentVolume", {**volume, "claimRef": {"namespace": "default", "name": name}}),
            ("PersistentVolumeClaim", {**claim, "volumeName": name}),
        ):
            make(control_plane, {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec})
        mounted = [{"name": "data", "persistentVolumeClaim": {"claimName": name}}]
        its_spec = {
            "nodeName": on,
            "volumes": mounted,
            "containers": [{"name": "main", "image": "registry.invalid/pause"}],
        }
        make(control_plane, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": its_spec})
    for kind in ("pvc", "pv"):
        control_plane.kubectl("get", kind, "mine", user=node_user(NODE))
        with pytest.raises(CommandError, match="no relationship found"):
            control_plane.kubectl("get", kind, "theirs", user=node_user(NODE))


def test_a_node_that_does_not_exist_is_not_drained(machine: NodeNamespace, kubeconfig: str) -> None:
    answer = machine.leave(LeaveTask.DRAIN, kubeconfig)
    assert answer["end"] == "unable"
    assert "the API server has no node gpu-node" in answer["message"]


@pytest.mark.usefixtures("nodes")
def test_an_api_server_that_does_not_answer_ends_the_drain_at_the_limit(
    control_plane: ControlPlane, machine: NodeNamespace, tmp_path: Path
) -> None:
    text = control_plane.kubeconfig(node_user(NODE))
    # Nothing listens on the discard port.
    (wrong := tmp_path / "wrong.conf").write_text(text.replace(f":{control_plane.port}", ":9"))
    answer = machine.leave(LeaveTask.DRAIN, f"--kubeconfig={wrong}")
    assert answer["end"] == "failed"
    assert "no answer from https://127.0.0.1:9" in answer["message"]
