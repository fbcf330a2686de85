"""What `unbounded-agent doctor --kubeconfig` reads from a cluster: objects as the API server returns them."""

from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import datetime
from typing import Any, TypeAlias

from msgspec import Struct, field

KubernetesObject: TypeAlias = Mapping[str, Any]
"""An object of Kubernetes' API. Any key that is used here may be missing."""


class Cluster(Struct, frozen=True):
    """The objects that matter for the machines' nodes. A field that could not be read is empty."""

    nodes: Sequence[KubernetesObject] = ()
    pods: Sequence[KubernetesObject] = ()
    """Pods on these nodes, and pods that wait for a node."""
    daemon_sets: Sequence[KubernetesObject] = ()
    events: Sequence[KubernetesObject] = ()
    """Events of type Warning, without those of other nodes' kubelets."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """The ends of the logs of containers that failed, by `NAMESPACE/POD`."""
    unmatched: Set[str] = frozenset()
    """The nodeSelectors, as `node_selector` returns them, that no node of the cluster matches. Only those of pods that
    wait for a GPU are looked up."""
    unknown: tuple[str, ...] = ()
    """What could not be read, one sentence each."""
    now: float = 0.0
    """When the objects were read, in seconds since the epoch."""


def name(item: KubernetesObject) -> str:
    """Return `NAMESPACE/NAME`, or only the name of an object without a namespace."""
    metadata = item.get("metadata") or {}
    return "/".join(each for each in (metadata.get("namespace"), metadata.get("name")) if each)


def labels(item: KubernetesObject) -> Mapping[str, str]:
    """Return the object's labels."""
    return (item.get("metadata") or {}).get("labels") or {}


def pod_spec(item: KubernetesObject) -> KubernetesObject:
    """Return the spec of a pod, or of the pods that a DaemonSet makes."""
    spec = item.get("spec") or {}
    return (spec.get("template") or {}).get("spec") or {} if "template" in spec else spec


def node_selector(item: KubernetesObject) -> str:
    """Return a pod's nodeSelector in the form of kubectl's argument --selector; empty if the pod has none."""
    selector = pod_spec(item).get("nodeSelector") or {}
    return ",".join(f"{key}={value}" for key, value in sorted(selector.items()))


def containers(item: KubernetesObject) -> Iterator[KubernetesObject]:
    """Yield the containers of a pod or a DaemonSet, without its init containers."""
    yield from pod_spec(item).get("containers") or ()


def environment(container: KubernetesObject) -> Mapping[str, str]:
    """Return the container's environment variables that have a literal value, not one from a field or a Secret."""
    return {
        each["name"]: each["value"] for each in container.get("env") or () if each.get("name") and each.get("value")
    }


def limited_resources(item: KubernetesObject) -> set[str]:
    """Return the names of the resources for which any container of a pod or DaemonSet has a limit."""
    return {resource for each in containers(item) for resource in (each.get("resources") or {}).get("limits") or {}}


def statuses(pod: KubernetesObject, *, init: bool = False) -> Iterator[KubernetesObject]:
    """Yield the statuses of the pod's containers, or of its init containers."""
    yield from (pod.get("status") or {}).get("initContainerStatuses" if init else "containerStatuses") or ()


def kubelet_messages(pod: KubernetesObject) -> Iterator[str]:
    """Yield the kubelet's reasons and messages for the current and last states of the pod's containers."""
    for each in (*statuses(pod, init=True), *statuses(pod)):
        for key in ("state", "lastState"):
            for state in (each.get(key) or {}).values():
                yield from (text for text in ((state or {}).get("reason"), (state or {}).get("message")) if text)


def crashes(pod: KubernetesObject) -> bool:
    """Return whether a container of the pod keeps failing."""
    waiting = (((each.get("state") or {}).get("waiting") or {}) for each in (*statuses(pod), *statuses(pod, init=True)))
    return any(
        each.get("reason") in ("CrashLoopBackOff", "RunContainerError", "CreateContainerError") for each in waiting
    )


def seconds(time: object) -> float:
    """Return a time of Kubernetes' API in seconds since the epoch; 0 if it is missing or malformed."""
    try:
        return datetime.fromisoformat(str(time).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
