"""Finds faults of a cluster that keep pods from GPUs of any vendor. Pure."""

import re
from collections.abc import Iterator

from agent.host.vendors import HOST_VENDORS
from agent.model.cluster import Cluster, KubernetesObject, limited_resources, name, node_selector, pod_spec, seconds
from agent.model.finding import Finding

RECENT = 1200.0
"""Seconds after which an event no longer counts. The API server keeps events for an hour, even if the fault is gone. A
fault that lasts has newer events, because controllers try again at least every 1000 seconds (client-go's back-off)."""
EVENTS: tuple[tuple[re.Pattern[str], str, tuple[str, ...]], ...] = (
    (
        re.compile(r'violates PodSecurity "[^"]*"'),
        "the API server rejects pods that are privileged or mount host paths",
        ("kubectl label --overwrite namespace {namespace} pod-security.kubernetes.io/enforce=privileged",),
    ),
    (
        re.compile(r'RuntimeClass\S* "[^"]*" not found|pod rejected: RuntimeClass "[^"]*" not found'),
        "pods name a runtime class that does not exist",
        ("unbounded-agent kube manifests runtime-class | kubectl apply -f -",),
    ),
    (
        re.compile(r'no runtime for "[^"]*" is configured'),
        "containerd in the machine does not know the handler of a runtime class",
        ("unbounded-agent status --wide  # on the host: RuntimeConfigured and RuntimeActive",),
    ),
    (
        re.compile(r"apparmor is not supported"),
        "a pod asks for an AppArmor profile, and containerd in a machine can load none",
        ("remove appArmorProfile from what makes the pod, or set its type to Unconfined",),
    ),
    (
        re.compile(r"unresolvable CDI devices? \S+"),
        "a pod asks for a CDI device that no specification has",
        (
            "unbounded-agent status --wide  # on the host: CDISpecCurrent",
            "kubectl -n {namespace} delete pod POD  # once CDISpecCurrent is True; its controller makes it again",
        ),
    ),
)
"""Patterns of events' messages, each with its cause and the commands that fix it."""


def findings(cluster: Cluster) -> tuple[Finding, ...]:
    """Return what is wrong in the cluster."""
    vendors = (each for vendor in HOST_VENDORS for each in vendor.cluster_findings(cluster))
    all_findings = [*_from_events(cluster), *_stale_selectors(cluster), *vendors]
    # Keep only the first of several findings with the same cause and fix: all pods of a DaemonSet may have one fault.
    return tuple({(each.cause, each.fix): each for each in reversed(all_findings)}.values())[::-1]


def _from_events(cluster: Cluster) -> Iterator[Finding]:
    for event in cluster.events:
        if cluster.now - _last(event) > RECENT:
            continue
        involved = event.get("involvedObject") or {}
        for pattern, cause, fix in EVENTS:
            if match := pattern.search(str(event.get("message", ""))):
                namespace, pod = str(involved.get("namespace", "")), str(involved.get("name", ""))
                evidence = f"{str(involved.get('kind', 'object')).lower()} {namespace}/{pod}: {match[0]}"
                yield Finding(cause, evidence, tuple(each.format(namespace=namespace) for each in fix))


def _last(event: KubernetesObject) -> float:
    """Return when the event last happened, in seconds since the epoch; 0 if it has no time."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max(seconds(each) for each in times)


def _stale_selectors(cluster: Cluster) -> Iterator[Finding]:
    """Yield a finding for each pod that waits for a GPU, and selects labels that no node of the cluster has."""
    for pod in cluster.pods:
        if waits_for_gpu(pod) and node_selector(pod) in cluster.unmatched:
            yield Finding(
                "a pod selects labels that no node has",
                f"pod {name(pod)} is Pending; its nodeSelector is {node_selector(pod)}",
                (
                    "kubectl get nodes --show-labels",
                    "correct the nodeSelector of what makes the pod, or label the node",
                ),
            )


def waits_for_gpu(pod: KubernetesObject) -> bool:
    """Return whether the pod requests a GPU and is not scheduled yet."""
    waits = (pod.get("status") or {}).get("phase") == "Pending" and not pod_spec(pod).get("nodeName")
    return waits and _asks_for_gpu(pod)


def _asks_for_gpu(pod: KubernetesObject) -> bool:
    spec = pod_spec(pod)
    words = [*limited_resources(pod), *(spec.get("nodeSelector") or {}), str(spec.get("runtimeClassName") or "")]
    return any("gpu" in each or each in {vendor.name for vendor in HOST_VENDORS} for each in words)
