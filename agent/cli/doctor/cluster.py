"""Reads the objects that concern GPUs from a cluster. Changes nothing there.

With kubectl, not agent.system.api_server: users' kubeconfigs often name a program that provides the credentials.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from agent.host.vendors import HOST_VENDORS
from agent.model.errors import CommandError
from agent.system.files import System
from agent.vendors.host_vendor import Cluster, Finding, KubernetesObject, crashes, name, pod_spec, seconds

# Finds faults of a cluster that keep pods from GPUs of any vendor. Pure.


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
    all_findings = [*_from_events(cluster), *vendors]
    # Keep only the first of several findings with the same cause and fix: all pods of a DaemonSet may have one fault.
    return tuple({(each.cause, each.fix): each for each in reversed(all_findings)}.values())[::-1]


def _from_events(cluster: Cluster) -> Iterator[Finding]:
    for event in cluster.events:
        # When it last happened; 0 if it has no time.
        series, involved = event.get("series") or {}, event.get("involvedObject") or {}
        times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
        if cluster.now - max(seconds(each) for each in times) > RECENT:
            continue
        for pattern, cause, fix in EVENTS:
            if match := pattern.search(str(event.get("message", ""))):
                namespace, pod = str(involved.get("namespace", "")), str(involved.get("name", ""))
                evidence = f"{str(involved.get('kind', 'object')).lower()} {namespace}/{pod}: {match[0]}"
                yield Finding(cause, evidence, tuple(each.format(namespace=namespace) for each in fix))


QUERY_LIMIT = 60.0
"""Seconds for one run of kubectl."""
LOGS = 5
"""Number of failing pods whose logs are read."""
LOG_LINES = 50
"""Lines that are read from the end of each log."""


def read_cluster(system: System, kubeconfig: str, nodes: Sequence[str]) -> Cluster:
    """Return what matters for these nodes, or for all nodes if `nodes` is empty.

    Objects that cannot be read are left out, and named in `unknown`.
    """
    kubectl = _Kubectl(system, kubeconfig)

    def concerns(node: str | None) -> bool:
        """Return whether an object that names this node, or no node, matters."""
        return not node or not nodes or node in nodes

    found_nodes = kubectl.items("nodes", *nodes, "--show-managed-fields")
    pods = kubectl.items("pods", "--all-namespaces", "--field-selector=status.phase=Pending")
    for selector in [f"={each}" for each in nodes] or ["!="]:
        pods += kubectl.items("pods", "--all-namespaces", f"--field-selector=spec.nodeName{selector}")
    pods = list({name(each): each for each in pods if concerns(pod_spec(each).get("nodeName"))}.values())
    events = kubectl.items("events", "--all-namespaces", "--field-selector=type=Warning")
    # Device plugins come first, because many other pods may fail for reasons that have nothing to do with GPUs.
    failing = sorted(filter(crashes, pods), key=lambda pod: "device-plugin" not in name(pod))[:LOGS]
    return Cluster(
        nodes=found_nodes,
        pods=pods,
        daemon_sets=kubectl.items("daemonsets.apps", "--all-namespaces"),
        # Events from a kubelet name its node; events from controllers name none.
        events=[each for each in events if concerns((each.get("source") or {}).get("host"))],
        logs={name(pod): kubectl.log(pod) for pod in failing},
        unknown=tuple(kubectl.unknown),
        now=time.time(),
    )


class _Kubectl:
    """Runs kubectl, and collects sentences on what could not be read."""

    def __init__(self, system: System, kubeconfig: str) -> None:
        self._system, self._kubeconfig = system, kubeconfig
        self.unknown: list[str] = []

    def items(self, *arguments: str) -> list[KubernetesObject]:
        """Return the objects of `kubectl get`; none if they cannot be read."""
        try:
            answer: Any = json.loads(self._run("get", *arguments, "--ignore-not-found", "--output=json") or "{}")
        except (CommandError, ValueError) as error:
            self.unknown.append(f"{arguments[0]} of the cluster: {error}")
            return []
        # For a single name, kubectl prints the object itself instead of a list.
        items = answer.get("items", [answer] if answer.get("metadata") else [])
        return [each for each in items if isinstance(each, dict)]

    def log(self, pod: KubernetesObject) -> str:
        """Return the ends of the logs of the containers' previous runs; kubectl's error if they cannot be read."""
        namespace, _, pod_name = name(pod).rpartition("/")
        # Without --ignore-errors, kubectl ends at the first container that has no previous run, such as an init
        # container.
        arguments = ("--all-containers", "--previous", "--ignore-errors", f"--tail={LOG_LINES}")
        try:
            return self._run("logs", f"--namespace={namespace}", pod_name, *arguments)
        except CommandError as error:
            return str(error)

    def _run(self, *arguments: str) -> str:
        return self._system.run("kubectl", f"--kubeconfig={self._kubeconfig}", *arguments, timeout=QUERY_LIMIT)
