"""Reads what concerns GPUs from a cluster, through kubectl. Changes nothing there."""

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from agent.model.cluster import Cluster, KubernetesObject, crashes, name
from agent.model.errors import CommandError
from agent.system.files import System

QUERY_LIMIT = 60.0
"""Seconds for one query."""
LOGS = 5
"""Of how many failing pods logs are read."""
LOG_LINES = 50
NODES_QUERIED = 20
"""For how many nodes pods are queried one node at a time; for more, pods of all nodes are queried."""


def read_cluster(system: System, kubeconfig: str, nodes: Sequence[str]) -> Cluster:
    """Return what the user of this kubeconfig may read. `nodes` are the machines' nodes; without any, all nodes."""
    kubectl = _Kubectl(system, kubeconfig)
    found_nodes = kubectl.items("nodes", *nodes, "--show-managed-fields")
    pods = kubectl.items("pods", "--all-namespaces", "--field-selector=status.phase=Pending")
    selectors = [f"spec.nodeName={each}" for each in nodes] if 0 < len(nodes) <= NODES_QUERIED else ["spec.nodeName!="]
    for selector in selectors:
        pods += kubectl.items("pods", "--all-namespaces", f"--field-selector={selector}")
    pods = list({name(each): each for each in pods}.values())
    return Cluster(
        nodes=found_nodes,
        pods=pods,
        daemon_sets=kubectl.items("daemonsets.apps", "--all-namespaces"),
        events=kubectl.items("events", "--all-namespaces", "--field-selector=type=Warning"),
        logs={name(pod): kubectl.log(pod) for pod in _failing(pods)},
        unknown=tuple(kubectl.unknown),
        now=time.time(),
    )


def _failing(pods: Iterable[KubernetesObject]) -> list[KubernetesObject]:
    # Device plugins first: many other pods may fail for reasons of their own.
    return sorted(filter(crashes, pods), key=lambda pod: "device-plugin" not in name(pod))[:LOGS]


class _Kubectl:
    """Runs kubectl, and collects what could not be read."""

    def __init__(self, system: System, kubeconfig: str) -> None:
        self._system, self._kubeconfig = system, kubeconfig
        self.unknown: list[str] = []

    def items(self, *arguments: str) -> list[KubernetesObject]:
        """Return the objects of `kubectl get`; none if they cannot be read."""
        try:
            found: Any = json.loads(self._run("get", *arguments, "--ignore-not-found", "--output=json") or "{}")
        except (CommandError, ValueError) as error:
            self.unknown.append(f"{arguments[0]} of the cluster: {error}")
            return []
        # Of a single name, kubectl prints the object itself.
        items = found.get("items", [found] if found.get("metadata") else [])
        return [each for each in items if isinstance(each, dict)]

    def log(self, pod: KubernetesObject) -> str:
        """Return the end of the log of the pod's failed containers; what can be read of it."""
        namespace, _, pod_name = name(pod).rpartition("/")
        try:
            return self._run(
                "logs", f"--namespace={namespace}", pod_name, "--all-containers", "--previous", f"--tail={LOG_LINES}"
            )
        except CommandError as error:
            # A container that never ran has no log: the kubelet's messages say why.
            return str(error)

    def _run(self, *arguments: str) -> str:
        return self._system.run("kubectl", f"--kubeconfig={self._kubeconfig}", *arguments, timeout=QUERY_LIMIT)
