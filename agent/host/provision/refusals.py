"""Finds settings that are valid but ask for something that no node can have, and says what to do instead. Pure.

A kubelet may give its own Node only some of the labels in Kubernetes' namespaces, and may not change the Node's taints
after the registration (NodeRestriction in Kubernetes' plugin/pkg/admission/noderestriction). Only an administrator can
set other labels or change the taints, with kubectl.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agent.config.settings import Config, MachineSettings
from agent.host.plan.nspawn import own_network
from agent.host.provision.host_goal import KUBELET_SYSCTLS, sysctl_name
from agent.host.provision.kubelet_files import taints
from agent.model.node import Problem

OWN_LABELS = frozenset(
    {
        "beta.kubernetes.io/arch",
        "beta.kubernetes.io/instance-type",
        "beta.kubernetes.io/os",
        "failure-domain.beta.kubernetes.io/region",
        "failure-domain.beta.kubernetes.io/zone",
        "kubernetes.io/arch",
        "kubernetes.io/hostname",
        "kubernetes.io/os",
        "node.kubernetes.io/instance-type",
        "topology.kubernetes.io/region",
        "topology.kubernetes.io/zone",
    }
)
"""Labels of Kubernetes that a kubelet may give its own Node (k8s.io/kubelet/pkg/apis/well_known_labels.go)."""
OWN_NAMESPACES = ("kubelet.kubernetes.io", "node.kubernetes.io")
"""Namespaces in which a kubelet may give its own Node any label."""
RESERVED_NAMESPACES = ("kubernetes.io", "k8s.io")

PROTECTED: Mapping[str, str] = {
    "apiVersion": "remove it",
    "kind": "remove it",
    "authentication.x509.clientCAFile": "set node.ca_file",
    "cgroupDriver": "remove it: containerd in the machine uses systemd's cgroups",
    "clusterDNS": "set node.kubelet.cluster_dns",
    "clusterDomain": "set node.kubelet.cluster_domain",
    "containerRuntimeEndpoint": "remove it: the machine's containerd is the only one with its GPUs",
    "failSwapOn": "set node.host.swap",
    "registerNode": "remove it: the node is made in order to join",
    "registerWithTaints": "set node.kubelet.taints",
    "rotateCertificates": "remove it: the bootstrap token is removed after the join, so certificates must be rotated",
}
"""Fields of KubeletConfiguration that settings must not set, with what to do instead."""


def refusals(config: Config) -> tuple[Problem, ...]:
    """Return what is wrong with the nodes of a valid configuration."""
    nodes = {name: machine for name, machine in config.machines.items() if machine.node}
    checks: tuple[Callable[[str, MachineSettings], Iterator[Problem]], ...] = (_labels, _taints, _fields, _devices)
    of_each = [problem for name, machine in nodes.items() for check in checks for problem in check(name, machine)]
    return (*of_each, *_names(nodes), *_networks(nodes), *_sysctls(nodes))


def label_command(node: str, key: str, value: str) -> str:
    """Return the command that gives a Node a label."""
    return f"kubectl label node {node} --overwrite {key}={value}"


def may_set(label: str) -> bool:
    """Return whether a kubelet may give its own Node a label (getForbiddenLabels)."""
    namespace = label.rpartition("/")[0]
    return not _within(namespace, RESERVED_NAMESPACES) or label in OWN_LABELS or _within(namespace, OWN_NAMESPACES)


def _within(namespace: str, domains: tuple[str, ...]) -> bool:
    return namespace in domains or namespace.endswith(tuple(f".{domain}" for domain in domains))


def _labels(machine: str, settings: MachineSettings) -> Iterator[Problem]:
    assert settings.node
    node = settings.node.name or "NODE"
    for key, value in sorted(settings.node.kubelet.labels.items()):
        if not may_set(key):
            command = label_command(node, key, value)
            yield Problem(
                "labels",
                f"machines.{machine}.node.kubelet.labels: no kubelet may give its own Node the label {key}",
                f"remove it there; when the node has joined, run `{command}` with the rights of an administrator",
            )


def _taints(machine: str, settings: MachineSettings) -> Iterator[Problem]:
    assert settings.node
    seen: set[tuple[str, str]] = set()
    for each in taints(settings.node.kubelet):
        key, effect = each["key"], each["effect"]
        if (key, effect) in seen:
            yield Problem(
                "taints",
                f"machines.{machine}.node.kubelet: two taints have the key {key} and the effect {effect}",
                "remove one of them: the API server refuses such a Node",
            )
        seen.add((key, effect))


def _fields(machine: str, settings: MachineSettings) -> Iterator[Problem]:
    assert settings.node
    overlay = settings.node.kubelet.configuration
    where = f"machines.{machine}.node.kubelet.configuration"
    for field, advice in PROTECTED.items():
        if _has(overlay, field.split(".")):
            yield Problem("kubelet", f"{where}: {field} must not be set", advice)
    try:
        json.dumps(overlay, allow_nan=False)
    except (TypeError, ValueError) as error:
        yield Problem("kubelet", f"{where}: JSON has no such value: {error}", "write it as a string or a number")


def _has(table: object, path: list[str]) -> bool:
    """Return whether a table sets the field at a path.

    If a part of the path has a value that is not a table, that counts as setting the field: the value replaces all
    fields below it.
    """
    if not path or not isinstance(table, dict):
        return True
    return path[0] in table and _has(table[path[0]], path[1:])


def _devices(machine: str, settings: MachineSettings) -> Iterator[Problem]:
    if not settings.nspawn.kmsg:
        yield Problem(
            "nspawn", f"machines.{machine}.nspawn.kmsg: no kubelet starts without /dev/kmsg", "remove kmsg = false"
        )


def _names(nodes: Mapping[str, MachineSettings]) -> Iterator[Problem]:
    taken: dict[str, str] = {}
    for machine, settings in nodes.items():
        name = settings.node.name if settings.node else ""
        if name in taken:
            what = f"be the node {name}" if name else "have the host's name as the name of their nodes"
            yield Problem(
                "name", f"machines {taken[name]} and {machine} would both {what}", f"set machines.{machine}.node.name"
            )
        taken.setdefault(name, machine)


def _networks(nodes: Mapping[str, MachineSettings]) -> Iterator[Problem]:
    shared = [machine for machine, settings in nodes.items() if not own_network(settings.nspawn)]
    if len(shared) > 1:
        yield Problem(
            "network",
            f"machines {', '.join(shared)} are nodes on the host's network: their kubelets would need the same ports "
            "(10250, 10248), and their pods the same interfaces and rules",
            "give all but one a network of its own: "
            + ", ".join(f"machines.{machine}.nspawn.virtual_ethernet = true" for machine in shared[1:]),
        )


def _sysctls(nodes: Mapping[str, MachineSettings]) -> Iterator[Problem]:
    chosen: dict[str, tuple[str, str]] = {}
    for machine, settings in nodes.items():
        wanted: Mapping[str, Any] = settings.node.host.sysctls if settings.node else {}
        for name, value in ((sysctl_name(each), value) for each, value in wanted.items()):
            where = f"machines.{machine}.node.host.sysctls: {name}"
            if (needed := KUBELET_SYSCTLS.get(name, value)) != value:
                yield Problem(
                    "sysctls", f"{where} is {value}, but no kubelet starts unless it is {needed}", "remove it"
                )
            other, earlier = chosen.setdefault(name, (machine, value))
            if earlier != value:
                yield Problem(
                    "sysctls", f"{where} is {value}, but {earlier} for {other}", "set the same value for both"
                )
