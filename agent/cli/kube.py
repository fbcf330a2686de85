"""`unbounded-agent kube`: the manifests that come with the agent, and the move of a node to DRA or back."""

import argparse
import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

import agent
from agent.cli.host import this_host
from agent.cli.lifecycle import recorded_node
from agent.cli.printing import say
from agent.cli.wiring import reconciler_for
from agent.host.reconcile import Reconciler
from agent.host.state.locks import machine_locks
from agent.machine.vendors import VENDOR_NAMES, machine_vendor
from agent.model.conditions import Condition, ConditionType, Reason
from agent.model.device import gives_gpus, is_zero
from agent.model.errors import AgentError, ConfigError, DocumentError
from agent.model.facts import Facts
from agent.model.handoff import DRA
from agent.model.json_document import parse_object
from agent.model.paths import DRA_DRIVER, cordoned_file
from agent.system.files import System

DIRECTORY = f"{os.path.dirname(agent.__file__)}/manifests"
"""The directory with the manifests: files NAME.yaml, each of which begins with a comment that says what it is."""
SUFFIX = ".yaml"


def run_manifests(options: argparse.Namespace) -> int:
    """Run `kube manifests` with these options."""
    return manifests(options.names, options.out, this_host())


def manifests(names: Sequence[str], directory: str | None, system: System) -> int:
    """Print the manifests of these names one after the other, or list all manifests if there are no names.

    With a directory, write the manifests there instead: those of these names, or all if there are no names. Raises
    ConfigError for an unknown name, and AgentError if a file there has other content: somebody may have edited it.
    """
    known = [each.removesuffix(SUFFIX) for each in system.entries(DIRECTORY)]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no manifest {', '.join(unknown)}: choose from {', '.join(known)}")
    texts = {name: system.read_text(f"{DIRECTORY}/{name}{SUFFIX}") for name in names or known}
    if directory is None:
        width = max(map(len, texts))
        purposes = [f"{name.ljust(width)}  {text.splitlines()[0].removeprefix('# ')}" for name, text in texts.items()]
        say(["---\n".join(texts.values()).rstrip("\n")] if names else purposes)
        return 0
    contents = {f"{os.path.abspath(directory)}/{name}{SUFFIX}": text.encode() for name, text in texts.items()}
    if changed := [path for path, each in contents.items() if system.exists(path) and system.read(path) != each]:
        raise AgentError(
            f"nothing was written, because these files have other content, perhaps edited: {', '.join(changed)}",
            "write into an empty directory, and compare the two with `diff -ru`; or name only manifests that are not "
            "there; to replace a file, remove it first",
        )
    for path, content in contents.items():
        system.write(path, content)
        say([path])
    return 0


# The steps that move a running node from a device plugin to Dynamic Resource Allocation, and back. The order matters.
#
# A device plugin does not know which GPUs agent.dra has given to pods, and agent.dra does not know
# which GPUs the plugin has given. So each could give a GPU to a pod although another pod already has it. Therefore no
# pod may have a GPU while the node is moved.


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


KUBECTL_LIMIT = 60.0
"""Seconds for one run of kubectl."""
CLASS = "device-class-"
"""Each manifest with a DeviceClass has a name that begins with this prefix and ends in the vendor's name."""


def run_allocation(options: argparse.Namespace) -> int:
    """Run `kube allocation` with these options."""
    return allocation(options, reconciler_for(options))


def allocation(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print the steps or, with a kubeconfig, take those that need only the cluster's API.

    Return 1 if the user must take a step before the move can go on: in the machine, in the configuration, or with other
    users' pods. Otherwise, return 0.
    """
    machine = _machine(options.machine, options.to, reconciler)
    if not options.kubeconfig:
        # The cluster is not observed. So the steps have NODE and RESOURCE (the device plugin's resource), which the
        # user must replace. The resource's count is unknown: it is 0 here, because a count of 0 is not printed.
        node = Node(options.node or "NODE", False, True, {}, {"RESOURCE": "0"}, (), (), ())
        steps = _steps(options.to, machine, node, reconciler, reconciler.preview()[0], ())
        say(line for number, step in enumerate(steps, start=1) for line in _lines(number, step))
        return 0
    # The name that `up` recorded, not the one that the machine reports: root in the machine could name another node.
    node_name = options.node or recorded_node(machine, reconciler, "name it with --node NODE")
    with machine_locks(reconciler.system, (machine,), "kube allocation"):
        return 0 if _Move(options.to, machine, node_name, options.kubeconfig, reconciler).run() else 1


def _machine(name: str, to: str, reconciler: Reconciler) -> str:
    """Return the machine of this name, or the only one if the name is empty. Raises ConfigError."""
    machines = reconciler.config.machines
    if not name and len(machines) == 1:
        return next(iter(machines))
    if name not in machines:
        known = ", ".join(machines) or "none"
        what = f"machine {name} is not configured" if name else "which machine?"
        raise ConfigError(f"{what} (configured: {known})", f"name one: `unbounded-agent kube allocation {to} MACHINE`")
    return name


def _steps(
    to: str, machine: str, node: Node, reconciler: Reconciler, facts: Facts, conditions: Iterable[Condition]
) -> tuple[Step, ...]:
    configured = reconciler.config.machines[machine].allocation
    if to != DRA:
        return to_device_plugin(machine, node, configured)
    vendors = sorted({gpu.vendor for vendor in facts.vendors for gpu in vendor.gpus})
    classes = [f"{DIRECTORY}/{CLASS}{vendor}{SUFFIX}" for vendor in vendors]
    reasons = [each.reason for each in conditions if each.type is ConditionType.GPUS_ADVERTISED]
    return to_dra(machine, node, configured, classes, reasons == [Reason.ADVERTISED] and configured == DRA)


def _lines(number: int, step: Step, state: str = "") -> list[str]:
    return [f"{number}. {state}{step.what}", *(f"     {command}" for command in step.commands)]


def _gives_gpus(resource: str) -> bool:
    vendors = (machine_vendor(name) for name in VENDOR_NAMES)
    return any(each and gives_gpus(resource, each.resource_prefix, each.harmless_resources) for each in vendors)


class _Move(Struct):
    """The move of one node."""

    to: str
    machine: str
    node: str
    kubeconfig: str
    reconciler: Reconciler

    def run(self) -> bool:
        """Take the steps in order. Stop at the first one that only the user can take. Return whether all are done."""
        for index in range(len(steps := self._reconcile_and_list_steps())):
            number, step = index + 1, steps[index]
            if not step.done and step.kubectl:
                self._take(step)
                # A step may change whether later ones are done.
                steps = self._reconcile_and_list_steps()
            elif not step.done:
                say([*_lines(number, step, "to do: "), "then repeat this command"])
                return False
            say([f"{number}. done: {step.what}"])
        return True

    def _take(self, step: Step) -> None:
        note = cordoned_file(self.machine)
        if step.kubectl[0] == "cordon":
            # Write the note before the node is cordoned, so that `start` uncordons the node if this command is never
            # repeated.
            self.reconciler.system.write(note, f"{self.node}\n".encode(), 0o600)
        self._kubectl(*step.kubectl)
        if step.kubectl[0] == "uncordon":
            self.reconciler.system.remove(note)

    def _reconcile_and_list_steps(self) -> tuple[Step, ...]:
        node = self._get("node", self.node)
        pods = self._get("pods", "--all-namespaces", f"--field-selector=spec.nodeName={self.node}")
        claims = self._kubectl("get", f"--output={CLAIM_LINES}", "resourceclaims", "--all-namespaces")
        slices = self._get("resourceslices", f"--field-selector=spec.nodeName={self.node},spec.driver={DRA_DRIVER}")
        try:
            observed = Node(
                self.node,
                bool(node["spec"].get("unschedulable")),
                self.reconciler.system.exists(cordoned_file(self.machine)),
                parse_counts(node, "allocatable", _gives_gpus),
                parse_counts(node, "capacity", _gives_gpus),
                parse_holders(pods, _gives_gpus),
                parse_claimants(claims, self.node),
                tuple(each["metadata"]["name"] for each in slices["items"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DocumentError(f"kubectl printed an object of an unexpected form: {error!r}") from error
        outcome = self.reconciler.reconcile()
        conditions = next(each.conditions for each in outcome.machines if each.name == self.machine)
        return _steps(self.to, self.machine, observed, self.reconciler, outcome.facts, conditions)

    def _get(self, *arguments: str) -> dict[str, Any]:
        return parse_object(f"kubectl get {arguments[0]}", self._kubectl("get", "--output=json", *arguments).encode())

    def _kubectl(self, *arguments: str) -> str:
        return self.reconciler.system.run(
            "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments, timeout=KUBECTL_LIMIT
        )
