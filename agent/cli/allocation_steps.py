"""The steps that move a running node from a device plugin to Dynamic Resource Allocation, and back. Pure.

The order matters. A device plugin does not know which GPUs agent.dra has given to pods, and agent.dra does not know
which GPUs the plugin has given. So each could give a GPU to a pod although another pod already has it. Therefore no pod
may have a GPU while the node is moved.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from agent.model.extended_resources import is_zero
from agent.model.handoff import DRA
from agent.model.paths import DRA_DRIVER

CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
CLAIM_LINES = (
    'jsonpath={range .items[*]}{.metadata.namespace}{"\\t"}{.status.allocation.devices.results[*].driver}{"\\t"}'
    '{.status.allocation.devices.results[*].pool}{"\\t"}{.status.reservedFor[*].name}{"\\n"}{end}'
)
"""The form of kubectl's output for `parse_claimants`: a line for each claim. In this form, a claim takes 60 bytes; as
JSON, it would take 3000. A cluster has many thousands of claims."""
PLUGIN = "the vendor's device plugin"


class Node(Struct, frozen=True):
    """A node's state at the API server."""

    name: str
    cordoned: bool
    cordoned_by_agent: bool
    """Whether the agent has cordoned the node."""
    allocatable: Mapping[str, str]
    """The counts that device plugins offer, by resource."""
    capacity: Mapping[str, str]
    """The counts that the kubelet has from device plugins, even from plugins that are gone."""
    holders: tuple[str, ...]
    """Pods, as `NAMESPACE/NAME`, that request a device plugin's resource and have no claim for it."""
    claimants: tuple[str, ...]
    """Pods, as `NAMESPACE/NAME`, with a claim that has a device of the node."""
    slices: tuple[str, ...]
    """Names of the node's ResourceSlices of DRA_DRIVER."""


class Step(Struct, frozen=True):
    """One step of the move."""

    what: str
    """What to do, in the imperative."""
    done: bool
    """Whether the step is done, as far as the agent can see."""
    commands: tuple[str, ...] = ()
    """The commands for an administrator, or what to do by hand."""
    kubectl: tuple[str, ...] = ()
    """The arguments of kubectl with which the agent takes the step; empty if only an administrator can take it."""


def parse_counts(node: Mapping[str, Any], kind: str, wanted: Callable[[str], bool]) -> dict[str, str]:
    """Return the nonzero counts of wanted resources in a Node's status.

    `kind` is the key of the status: allocatable or capacity. Raises KeyError.
    """
    counts = (node["status"].get(kind) or {}).items()
    return {name: str(count) for name, count in counts if wanted(name) and not is_zero(str(count))}


def parse_holders(pods: Mapping[str, Any], wanted: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the pods that have wanted resources of a device plugin.

    `pods` is kubectl's list of the node's pods. Raises KeyError.
    """
    metadata = (pod["metadata"] for pod in pods["items"] if _has_plugin_gpu(pod, wanted))
    return tuple(sorted(f"{each['namespace']}/{each['name']}" for each in metadata))


def _has_plugin_gpu(pod: Mapping[str, Any], wanted: Callable[[str], bool]) -> bool:
    """Return whether a pod has GPUs of a device plugin.

    That is so if the pod requests them and has not ended, and the scheduler made no claim for the pod.
    """
    status = pod.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed") or status.get("extendedResourceClaimStatus"):
        return False
    spec = pod["spec"]
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    requested = {
        name
        for each in containers
        for kind in ("limits", "requests")
        for name, count in ((each.get("resources") or {}).get(kind) or {}).items()
        if not is_zero(str(count))
    }
    return any(map(wanted, requested))


def parse_claimants(claims: str, node: str) -> tuple[str, ...]:
    """Return the pods that have a device of the node. Raises ValueError.

    `claims` is kubectl's list of all claims of the cluster, printed in the form CLAIM_LINES.
    """
    claimants = set()
    for line in claims.splitlines():
        namespace, drivers, pools, pods = line.split("\t")
        if (DRA_DRIVER, node) in zip(drivers.split(), pools.split(), strict=True):
            claimants |= {f"{namespace}/{pod}" for pod in pods.split()}
    return tuple(sorted(claimants))


def to_dra(machine: str, node: Node, configured: str, classes: Iterable[str], advertised: bool) -> tuple[Step, ...]:
    """Return the steps to Dynamic Resource Allocation.

    `configured` is the machine's setting `allocation`, `classes` are files with DeviceClasses, and `advertised` is
    whether GPUsAdvertised shows that agent.dra offers the GPUs.
    """
    files = tuple(classes)
    return (
        _cordon(node),
        _end_pods(node.holders, "have GPUs from the device plugin"),
        Step(
            f"remove {PLUGIN} from the node{_counts_text(node.allocatable)}",
            not node.allocatable,
            (
                "delete its DaemonSet, or exclude the node in its node selector, and wait for its pod to end",
                "if the kubelet has restarted since then, the plugin's counts stay in the node's status; remove them:",
                *_remove_counts(node),
            ),
        ),
        Step(
            f'make the kubelet forget the plugin{_counts_text(node.capacity)}, and set allocation = "{DRA}"',
            not node.capacity and configured == DRA,
            (
                f"systemctl --machine={machine} stop kubelet",
                f"systemd-run --machine={machine} --wait --quiet rm -f {CHECKPOINT}",
                f"systemctl --machine={machine} start kubelet",
                # The kubelet would remove the counts itself if its directory of device plugins were empty, but it has
                # just made its own socket there (ShouldResetExtendedResourceCapacity in Kubernetes 1.36).
                *_remove_counts(node),
                *_configuring(machine, DRA),
            ),
        ),
        Step(
            "make the DeviceClasses",
            # A node without GPUs needs no DeviceClasses.
            not files,
            tuple(f"kubectl apply --filename={file}" for file in files),
            ("apply", *(f"--filename={file}" for file in files)),
        ),
        Step("wait until the node offers its GPUs (GPUsAdvertised)", advertised, ("unbounded-agent status",)),
        _uncordon(node),
    )


def to_device_plugin(machine: str, node: Node, configured: str) -> tuple[Step, ...]:
    """Return the steps back to the device plugin."""
    still = f" (it still has {', '.join(node.slices)})" if node.slices else ""
    return (
        _cordon(node),
        _end_pods(node.claimants, "have GPUs by a claim"),
        Step(
            'set allocation = "device-plugin" for the machine',
            configured != DRA,
            _configuring(machine, "device-plugin"),
        ),
        Step(
            f"wait until the node has no ResourceSlice of {DRA_DRIVER}{still}",
            not node.slices,
            (f"kubectl get resourceslices --field-selector=spec.nodeName={node.name},spec.driver={DRA_DRIVER}",),
        ),
        Step(
            f"deploy {PLUGIN} to the node",
            bool(node.allocatable),
            ("unbounded-agent kube manifests", "see docs/kubernetes.md"),
        ),
        _uncordon(node),
    )


def _cordon(node: Node) -> Step:
    return Step("keep new pods off the node", node.cordoned, (f"kubectl cordon {node.name}",), ("cordon", node.name))


def _uncordon(node: Node) -> Step:
    command = f"kubectl uncordon {node.name}"
    return Step("let new pods on the node", not node.cordoned_by_agent, (command,), ("uncordon", node.name))


def _end_pods(pods: tuple[str, ...], what: str) -> Step:
    named = (pod.partition("/") for pod in pods)
    commands = tuple(f"kubectl --namespace={namespace} delete pod {name}" for namespace, _, name in named)
    return Step(f"end the pods that {what}", not pods, commands)


def _remove_counts(node: Node) -> tuple[str, ...]:
    """Return the command that removes device plugins' resources from the node's status, if it has any."""
    # In a merge patch, null removes a key.
    nulls = dict.fromkeys(sorted({*node.capacity, *node.allocatable}))
    if not nulls:
        return ()
    patch = json.dumps({"status": {"capacity": nulls, "allocatable": nulls}}, separators=(",", ":"))
    return (f"kubectl patch node {node.name} --subresource=status --type=merge --patch={shlex.quote(patch)}",)


def _configuring(machine: str, wanted: str) -> tuple[str, ...]:
    return (
        f'in /etc/unbounded-agent: [machines.{machine}] allocation = "{wanted}"',
        "systemctl reload unbounded-agent",
    )


def _counts_text(counts: Mapping[str, str]) -> str:
    listed = ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()) if not is_zero(count))
    return f" (the node's status still has {listed})" if listed else ""
