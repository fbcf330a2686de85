"""The steps that move a running node from a device plugin to Dynamic Resource Allocation, and back.

The order matters. A device plugin does not know which GPUs agent.dra has given to pods, and agent.dra does not know
which GPUs the plugin has given. So each could give a GPU to a pod although another pod already has it. Therefore no pod
may have a GPU while the node is moved.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

import agent
from agent.host.provision.node_files import NODE_RECORDS, NodeRecord, record_paths
from agent.host.reconcile import Reconciler
from agent.model.conditions import ConditionType, Reason
from agent.model.device import is_zero
from agent.model.errors import CommandError, ConfigError, DocumentError, ExitCodeError
from agent.model.facts import Absent, Facts
from agent.model.handoff import DRA
from agent.model.json_document import parse_object
from agent.model.paths import CORDONED_FOR, DRA_DRIVER, cordoned_file
from agent.system.files import System

DIRECTORY = f"{os.path.dirname(agent.__file__)}/manifests"
"""The directory with the manifests: files NAME.yaml, each of which begins with a comment that says what it is."""
SUFFIX = ".yaml"
CLASS = "device-class-"
"""Each manifest with a DeviceClass has a name that begins with this prefix and ends in the vendor's name."""
CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
CLAIM_LINES = (
    'jsonpath={range .items[*]}{.metadata.namespace}{"\\t"}{.status.allocation.devices.results[*].driver}{"\\t"}'
    '{.status.allocation.devices.results[*].pool}{"\\t"}{.status.reservedFor[*].name}{"\\n"}{end}'
)
"""The form of kubectl's output for `parse_claimants`: a line for each claim. In this form, a claim takes 60 bytes; as
JSON, it would take 3000. A cluster has many thousands of claims."""
PLUGIN = "the vendor's device plugin"
CORDONED = "true"
_FOR_GPUS = CORDONED_FOR.replace(".", r"\.")
UNSCHEDULABLE = ("get", f"--output=jsonpath={{.spec.unschedulable}}{{.metadata.annotations.{_FOR_GPUS}}}", "node")
"""kubectl's arguments before a node's name: it prints CORDONED if the node is cordoned, with something after it if the
machine did that for a fenced GPU."""
KUBECTL_LIMIT = 60.0
"""Seconds for one run of kubectl."""


class Node(Struct, frozen=True):
    """A node's state at the API server."""

    name: str
    cordoned: bool
    cordoned_for_gpus: bool
    """Whether its machine has cordoned it, and lifts that when no GPU is fenced."""
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

    def lines(self, number: int, state: str = "") -> list[str]:
        """Return the step and its commands in words."""
        return [f"{number}. {state}{self.what}", *(f"     {command}" for command in self.commands)]


def recorded_node(name: str, system: System, advice: str) -> str:
    """Return the name of the machine's Node object. Raises ConfigError with the advice if `up` did not record it."""
    record = NODE_RECORDS.read(record_paths(name), system)
    if isinstance(record, NodeRecord):
        return record.node
    what = "it is unknown which Node object the machine has"
    why = record.why if not isinstance(record, Absent) else "`up` did not make the machine"
    raise ConfigError(f"{name}: {what}: {why}", advice)


def cordon(machine: str, node: str, kubectl: Callable[..., str], system: System, *, again: bool = False) -> None:
    """Cordon the machine's node. `kubectl` runs that program with the arguments.

    `again`: it is cordoned for a fenced GPU. Without the annotation, the machine no longer lifts that.

    The note comes first, so that `start` uncordons the node if this command is never repeated. It is removed if the
    node was not cordoned.
    """
    system.write(note := cordoned_file(machine), f"{node}\n".encode(), 0o600)
    try:
        kubectl("cordon", node)
        if again:
            kubectl("annotate", "node", node, f"{CORDONED_FOR}-")
    except ExitCodeError:
        with suppress(CommandError):
            if kubectl(*UNSCHEDULABLE, node).strip() != CORDONED:
                system.remove(note)
        raise


def parse_counts(node: Mapping[str, Any], kind: str, wanted: Callable[[str], bool]) -> dict[str, str]:
    """Return the nonzero counts of wanted resources in a Node's status.

    `kind` is the key of the status: allocatable or capacity. Raises KeyError.
    """
    counts = (node["status"].get(kind) or {}).items()
    return {name: str(count) for name, count in counts if wanted(name) and not is_zero(str(count))}


def parse_holders(pods: Mapping[str, Any], wanted: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the pods that have wanted resources of a device plugin.

    A pod has them if it requests them and has not ended, and the scheduler made no claim for the pod. `pods` is
    kubectl's list of the node's pods. Raises KeyError.
    """
    found = []
    for pod in pods["items"]:
        status, spec = pod.get("status") or {}, pod["spec"]
        if status.get("phase") in ("Succeeded", "Failed") or status.get("extendedResourceClaimStatus"):
            continue
        requested = {
            name
            for each in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
            for kind in ("limits", "requests")
            for name, count in ((each.get("resources") or {}).get(kind) or {}).items()
            if not is_zero(str(count))
        }
        if any(map(wanted, requested)):
            found.append(f"{pod['metadata']['namespace']}/{pod['metadata']['name']}")
    return tuple(sorted(found))


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


def steps(
    to: str, machine: str, node: Node, reconciler: Reconciler, facts: Facts, *, advertised: bool = False
) -> tuple[Step, ...]:
    """Return the steps of the move `to` Dynamic Resource Allocation, or to the device plugin.

    `advertised` is whether GPUsAdvertised shows that the node offers its GPUs.
    """
    configured = reconciler.config.machines[machine].allocation
    if to != DRA:
        return to_device_plugin(machine, node, configured)
    vendors = sorted({gpu.vendor for vendor in facts.vendors for gpu in vendor.gpus})
    classes = [f"{DIRECTORY}/{CLASS}{vendor}{SUFFIX}" for vendor in vendors]
    return to_dra(machine, node, configured, classes, advertised and configured == DRA)


def to_dra(machine: str, node: Node, configured: str, files: Sequence[str], advertised: bool) -> tuple[Step, ...]:
    """Return the steps to Dynamic Resource Allocation.

    `configured` is the machine's setting `allocation`, `files` have the DeviceClasses, and `advertised` is whether
    GPUsAdvertised shows that agent.dra offers the GPUs.
    """
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
    commands: tuple[str, ...] = (f"kubectl cordon {node.name}",)
    if node.cordoned_for_gpus:
        commands += (f"kubectl annotate node {node.name} {CORDONED_FOR}-",)
    done = node.cordoned and not node.cordoned_for_gpus
    return Step("keep new pods off the node", done, commands, ("cordon", node.name))


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


class Move(Struct, frozen=True):
    """The move of one node."""

    to: str
    machine: str
    node: str
    kubeconfig: str
    reconciler: Reconciler
    gives_gpus: Callable[[str], bool]
    """Returns whether a resource of a device plugin gives pods GPUs."""
    say: Callable[[Iterable[str]], None]
    """Prints lines."""

    def run(self) -> bool:
        """Take the steps in order. Stop at the first one that only the user can take. Return whether all are done."""
        for index in range(len(listed := self._reconcile_and_list_steps())):
            number, step = index + 1, listed[index]
            if not step.done and step.kubectl:
                system = self.reconciler.system
                if step.kubectl[0] == "cordon":
                    cordon(self.machine, self.node, self._kubectl, system, again=len(step.commands) > 1)
                else:
                    self._kubectl(*step.kubectl)
                if step.kubectl[0] == "uncordon":
                    system.remove(cordoned_file(self.machine))
                # A step may change whether later ones are done.
                listed = self._reconcile_and_list_steps()
            elif not step.done:
                self.say([*step.lines(number, "to do: "), "then repeat this command"])
                return False
            self.say([f"{number}. done: {step.what}"])
        return True

    def _reconcile_and_list_steps(self) -> tuple[Step, ...]:
        node = self._get("node", self.node)
        pods = self._get("pods", "--all-namespaces", f"--field-selector=spec.nodeName={self.node}")
        claims = self._kubectl("get", f"--output={CLAIM_LINES}", "resourceclaims", "--all-namespaces")
        slices = self._get("resourceslices", f"--field-selector=spec.nodeName={self.node},spec.driver={DRA_DRIVER}")
        try:
            observed = Node(
                self.node,
                bool(node["spec"].get("unschedulable")),
                CORDONED_FOR in (node["metadata"].get("annotations") or {}),
                self.reconciler.system.exists(cordoned_file(self.machine)),
                parse_counts(node, "allocatable", self.gives_gpus),
                parse_counts(node, "capacity", self.gives_gpus),
                parse_holders(pods, self.gives_gpus),
                parse_claimants(claims, self.node),
                tuple(each["metadata"]["name"] for each in slices["items"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DocumentError(f"kubectl printed an object of an unexpected form: {error!r}") from error
        outcome = self.reconciler.reconcile()
        (machine,) = (each for each in outcome.machines if each.name == self.machine)
        advertised = machine.condition(ConditionType.GPUS_ADVERTISED).reason == Reason.ADVERTISED
        return steps(self.to, self.machine, observed, self.reconciler, outcome.facts, advertised=advertised)

    def _get(self, *arguments: str) -> dict[str, Any]:
        return parse_object(f"kubectl get {arguments[0]}", self._kubectl("get", "--output=json", *arguments).encode())

    def _kubectl(self, *arguments: str) -> str:
        return self.reconciler.system.run(
            "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments, timeout=KUBECTL_LIMIT
        )
