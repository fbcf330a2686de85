"""Finds faults of a cluster that keep pods from NVIDIA's GPUs. Pure."""

import re
import shlex
from collections.abc import Iterator

from agent.model.cluster import (
    Cluster,
    KubernetesObject,
    containers,
    crashes,
    environment,
    kubelet_messages,
    labels,
    limited_resources,
    name,
    pod_spec,
    seconds,
    statuses,
)
from agent.model.finding import Finding

RESOURCE = "nvidia.com/gpu"
PRESENT = "nvidia.com/gpu.present"
DEPLOY = "nvidia.com/gpu.deploy."
RUNTIME_CLASS = "nvidia"
HELM = "helm upgrade --namespace gpu-operator gpu-operator nvidia/gpu-operator --version VERSION --reuse-values --set"
"""The beginning of a command that changes a setting of the GPU Operator. Without --version, the command would also
upgrade the Operator."""
INSTALLED = "# VERSION is the installed one: helm list -n gpu-operator"
PLUGIN = "device-plugin"
STRATEGY = "DEVICE_LIST_STRATEGY"
VALIDATION = "-validation"
"""Suffix of the names of the GPU Operator's init containers that wait for its validator's files."""
LATE = 300.0
"""Seconds after which an init container is assumed to wait in vain."""
RECENT = 600.0
"""Seconds for which the change of a label counts as recent."""
SETTLED = 3600.0
"""Age of a Node, in seconds, at which it should have all its labels."""
MANAGER = re.compile(r"gpu-?operator", re.IGNORECASE)
"""Pattern of the names under which the GPU Operator owns fields of objects (metadata.managedFields)."""

PLUGIN_LOGS = (
    (
        re.compile(r"(libcuda|libnvidia-ml)\.so[.\d]*: cannot open|could not load NVML|ERROR_LIBRARY_NOT_FOUND", re.I),
        "the device plugin does not find the driver's libraries",
        (
            "unbounded-agent kube manifests runtime-class device-plugin | kubectl apply -f -  # the settings that work",
            "or set runtimeClassName: nvidia and NVIDIA_DRIVER_ROOT=/ in its values: docs/kubernetes.md",
            "unbounded-agent status --wide  # on the host: LibrariesLinked",
        ),
    ),
    (
        re.compile(r"invalid (device.list.)?strategy:? *\S*", re.I),
        "the device plugin's DEVICE_LIST_STRATEGY has a value that does not exist",
        ("kubectl -n {namespace} set env {owner} DEVICE_LIST_STRATEGY=envvar  # or cdi-cri",),
    ),
)
"""Patterns of messages in the device plugin's log, each with the cause and the fix."""
TOO_NEW = re.compile(
    r"unsatisfied condition: cuda *[<>=]+ *[\d.]+|CUDA driver version is insufficient for CUDA runtime version|"
    r"(?:system has unsupported|forward compatibility was attempted on non supported) .{0,40}"
)
"""Messages of nvidia-container-cli and cudaGetErrorString() if a container's CUDA needs a newer driver."""


def cluster_findings(cluster: Cluster) -> Iterator[Finding]:
    """Yield the faults of the cluster that keep pods from NVIDIA's GPUs."""
    plugins = [each for each in cluster.pods if _is_plugin(each)]
    for pod in plugins:
        yield from _failing_plugin(pod, cluster)
    for pod in cluster.pods:
        yield from _waits_for_markers(pod, cluster.now)
        yield from _needs_newer_driver(pod, cluster)
    yield from _without_runtime_class(cluster, plugins)
    for node in cluster.nodes:
        yield from _unlabelled(node, cluster)
        yield from _reverted(node, cluster.now)
        yield from _installs_own_parts(node, cluster)


def _is_plugin(pod: KubernetesObject) -> bool:
    return any(
        PLUGIN in str(each.get("image", "")) and "nvidia" in str(each.get("image", "")) for each in containers(pod)
    )


def _owner(pod: KubernetesObject) -> str:
    """Return the pod's owner as `kind/name`; the pod itself if it has no owner.

    The text is quoted for a command, because whoever makes the pod can name any owner.
    """
    owner = ((pod.get("metadata") or {}).get("ownerReferences") or [{}])[0]
    name = owner.get("name", (pod.get("metadata") or {}).get("name", ""))
    return shlex.quote(f"{str(owner.get('kind', 'pod')).lower()}/{name}")


def _failing_plugin(pod: KubernetesObject, cluster: Cluster) -> Iterator[Finding]:
    if not crashes(pod):
        return
    text = "\n".join((*kubelet_messages(pod), cluster.logs.get(name(pod), "")))
    namespace = str((pod.get("metadata") or {}).get("namespace", ""))
    for pattern, cause, fix in PLUGIN_LOGS:
        if found := pattern.search(text):
            commands = tuple(each.format(namespace=namespace, owner=_owner(pod)) for each in fix)
            yield Finding(cause, f"pod {name(pod)}: {_line(text, found)}", commands)
            return
    logs = f"kubectl -n {namespace} logs {name(pod).rpartition('/')[2]} --previous"
    yield Finding("the device plugin keeps failing", f"pod {name(pod)}: CrashLoopBackOff", (logs,))


def _line(text: str, found: re.Match[str]) -> str:
    """Return the line that contains a match; of a longer line, only the last 300 characters."""
    start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    return text[start : end if end >= 0 else len(text)].strip()[-300:]


def _waits_for_markers(pod: KubernetesObject, now: float) -> Iterator[Finding]:
    for each in statuses(pod, init=True):
        running = (each.get("state") or {}).get("running")
        late = running is not None and now - seconds(running.get("startedAt")) > LATE
        if late and str(each.get("name", "")).endswith(VALIDATION) and "nvidia-operator-validator" not in name(pod):
            yield Finding(
                "a component of the GPU Operator waits for files of the Operator's validator",
                f"pod {name(pod)}: init container {each['name']} is still running",
                (
                    "set machines.NAME.validation_markers = true, then: systemctl reload unbounded-agent",
                    "unbounded-agent status --wide  # ValidationMarkersSet says which file is missing and why",
                ),
            )


def _needs_newer_driver(pod: KubernetesObject, cluster: Cluster) -> Iterator[Finding]:
    text = "\n".join((*kubelet_messages(pod), cluster.logs.get(name(pod), "")))
    if found := TOO_NEW.search(text):
        yield Finding(
            "a pod's CUDA is newer than the driver supports",
            f"pod {name(pod)}: {_line(text, found)}",
            (
                "unbounded-agent doctor | grep 'driver for pods'  # on the host: the newest CUDA that works",
                "use an image with that CUDA version or an older one, or install a newer driver on the host",
            ),
        )


def _without_runtime_class(cluster: Cluster, plugins: list[KubernetesObject]) -> Iterator[Finding]:
    strategies = {
        environment(each).get(STRATEGY, "envvar")
        for pod in plugins
        for each in containers(pod)
        if PLUGIN in str(each.get("image", ""))
    }
    if strategies != {"envvar"}:
        # With a CDI strategy, the kubelet requests the CDI devices, so pods need no runtime class. If there is no
        # plugin, or if plugins have different strategies, the strategy that counts for a pod is unknown.
        return
    for pod in cluster.pods:
        running = (pod.get("status") or {}).get("phase") == "Running"
        if running and RESOURCE in limited_resources(pod) and not pod_spec(pod).get("runtimeClassName"):
            yield Finding(
                "a pod has a GPU allocated, but no runtime class that gives it the GPU",
                f"pod {name(pod)} has a limit {RESOURCE} and no runtimeClassName; the plugin's strategy is envvar",
                (
                    f"set runtimeClassName: {RUNTIME_CLASS} in the pod",
                    "or DEVICE_LIST_STRATEGY=cdi-cri for the plugin, or machines.NAME.default_runtime = true",
                ),
            )


def _unlabelled(node: KubernetesObject, cluster: Cluster) -> Iterator[Finding]:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    if RESOURCE not in allocatable or labels(node).get(PRESENT) == "true":
        return
    selecting = [
        each for each in (*cluster.pods, *cluster.daemon_sets) if PRESENT in (pod_spec(each).get("nodeSelector") or {})
    ]
    if selecting:
        yield Finding(
            f"node {name(node)} has GPUs, but not the label {PRESENT}=true, which pods select",
            f"{RESOURCE} is allocatable there; {name(selecting[0])} has the nodeSelector {PRESENT}",
            (
                f"kubectl label node {name(node)} {PRESENT}=true",
                "or set gpu_labels in machines.NAME.node.kubelet before `up`; the GPU Operator sets the label itself",
            ),
        )


def _reverted(node: KubernetesObject, now: float) -> Iterator[Finding]:
    metadata = node.get("metadata") or {}
    if now - seconds(metadata.get("creationTimestamp")) < SETTLED:
        return
    for entry in metadata.get("managedFields") or ():
        owned = (((entry.get("fieldsV1") or {}).get("f:metadata") or {}).get("f:labels") or {}).keys()
        deploy_labels = [each.removeprefix("f:") for each in owned if each.startswith(f"f:{DEPLOY}")]
        recent = now - seconds(entry.get("time")) < RECENT
        if deploy_labels and recent and MANAGER.search(str(entry.get("manager", ""))):
            yield Finding(
                f"the GPU Operator keeps setting labels of node {name(node)} that something else changes",
                f"{', '.join(sorted(deploy_labels)[:3])}: set by {entry['manager']} at {entry['time']}",
                (
                    "leave these labels as the Operator sets them: no pods of its driver and toolkit are needed here",
                    f"{HELM} driver.enabled=false,toolkit.enabled=false  {INSTALLED}",
                ),
            )


def _installs_own_parts(node: KubernetesObject, cluster: Cluster) -> Iterator[Finding]:
    for part, setting in (("driver", "driver.enabled"), ("container-toolkit", "toolkit.enabled")):
        label = f"{DEPLOY}{part}"
        active_sets = [
            each
            for each in cluster.daemon_sets
            if label in (pod_spec(each).get("nodeSelector") or {})
            and (each.get("status") or {}).get("desiredNumberScheduled", 0)
        ]
        if labels(node).get(label) == "true" and active_sets:
            yield Finding(
                f"the GPU Operator installs its own {part} into node {name(node)}, which already has it",
                f"label {label}=true; DaemonSet {name(active_sets[0])} runs pods on such nodes",
                (f"{HELM} {setting}=false  {INSTALLED}",),
            )
