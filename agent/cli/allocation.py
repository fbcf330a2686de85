"""`unbounded-agent kube allocation`: moves a node from the device plugin to Dynamic Resource Allocation, or back.

Without a kubeconfig it prints the steps. With one, it takes the steps that need only the cluster's API, and stops at
the first one that the user must take: in the machine, in the configuration, or with other users' pods.
"""

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from agent.cli.allocation_steps import (
    CLAIM_LINES,
    Node,
    Step,
    parse_claimants,
    parse_counts,
    parse_holders,
    to_device_plugin,
    to_dra,
)
from agent.cli.kube import DIRECTORY, SUFFIX
from agent.cli.lifecycle import recorded_node
from agent.cli.printing import say
from agent.cli.wiring import reconciler_for
from agent.host.reconcile import Reconciler
from agent.host.state.locks import machine_locks
from agent.machine.vendors import VENDOR_NAMES, machine_vendor
from agent.model.conditions import Condition, ConditionType
from agent.model.errors import ConfigError, DocumentError
from agent.model.extended_resources import gives_gpus
from agent.model.facts import Facts
from agent.model.handoff import DRA
from agent.model.json_document import parse_object
from agent.model.paths import DRA_DRIVER, cordoned_file
from agent.model.reasons import Reason

KUBECTL_LIMIT = 60.0
"""Seconds for one run of kubectl."""
CLASS = "device-class-"
"""Each manifest with a DeviceClass has a name that begins with this prefix and ends in the vendor's name."""


def run_allocation(options: argparse.Namespace) -> int:
    """Run `kube allocation` with these options."""
    return allocation(options, reconciler_for(options))


def allocation(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print the steps, or take them. Return 0 if the node is moved, or if the steps were only printed.

    Return 1 if the user must take a step before the move can go on.
    """
    machine = _machine(options.machine, options.to, reconciler)
    if not options.kubeconfig:
        # The cluster is not observed. So the steps have NODE and RESOURCE (the device plugin's resource), which the
        # user must replace. The resource's count is unknown: it is 0 here, because a count of 0 is not printed.
        node = Node(options.node or "NODE", False, True, {}, {"RESOURCE": "0"}, (), (), ())
        say(_listing(_steps(options.to, machine, node, reconciler, reconciler.preview()[0], ())))
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


def _listing(steps: tuple[Step, ...]) -> Iterator[str]:
    for number, step in enumerate(steps, start=1):
        yield f"{number}. {step.what}"
        yield from (f"     {command}" for command in step.commands)


def _gives_gpus(resource: str) -> bool:
    vendors = (machine_vendor(name) for name in VENDOR_NAMES)
    return any(each and gives_gpus(resource, each.resource_prefix, each.harmless_resources) for each in vendors)


class _Move:
    """The move of one node."""

    def __init__(self, to: str, machine: str, node: str, kubeconfig: str, reconciler: Reconciler) -> None:
        self._to, self._machine, self._node = to, machine, node
        self._kubeconfig, self._reconciler, self._system = kubeconfig, reconciler, reconciler.system

    def run(self) -> bool:
        """Take the steps in order. Stop at the first one that only the user can take. Return whether all are done."""
        for index in range(len(steps := self._reconcile_and_list_steps())):
            number, step = index + 1, steps[index]
            if not step.done and step.kubectl:
                self._take(step)
                # A step may change whether later ones are done.
                steps = self._reconcile_and_list_steps()
            elif not step.done:
                say([f"{number}. to do: {step.what}", *(f"     {command}" for command in step.commands)])
                say(["then repeat this command"])
                return False
            say([f"{number}. done: {step.what}"])
        return True

    def _take(self, step: Step) -> None:
        note = cordoned_file(self._machine)
        if step.kubectl[0] == "cordon":
            # Write the note before the node is cordoned, so that `start` uncordons the node if this command is never
            # repeated.
            self._system.write(note, f"{self._node}\n".encode(), 0o600)
        self._kubectl(*step.kubectl)
        if step.kubectl[0] == "uncordon":
            self._system.remove(note)

    def _reconcile_and_list_steps(self) -> tuple[Step, ...]:
        node = self._get("node", self._node)
        pods = self._get("pods", "--all-namespaces", f"--field-selector=spec.nodeName={self._node}")
        claims = self._kubectl("get", f"--output={CLAIM_LINES}", "resourceclaims", "--all-namespaces")
        slices = self._get("resourceslices", f"--field-selector=spec.nodeName={self._node},spec.driver={DRA_DRIVER}")
        try:
            observed = Node(
                self._node,
                bool(node["spec"].get("unschedulable")),
                self._system.exists(cordoned_file(self._machine)),
                parse_counts(node, "allocatable", _gives_gpus),
                parse_counts(node, "capacity", _gives_gpus),
                parse_holders(pods, _gives_gpus),
                parse_claimants(claims, self._node),
                tuple(each["metadata"]["name"] for each in slices["items"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DocumentError(f"kubectl printed an object of an unexpected form: {error!r}") from error
        outcome = self._reconciler.reconcile()
        conditions = next(each.conditions for each in outcome.machines if each.name == self._machine)
        return _steps(self._to, self._machine, observed, self._reconciler, outcome.facts, conditions)

    def _get(self, *arguments: str) -> dict[str, Any]:
        return parse_object(f"kubectl get {arguments[0]}", self._kubectl("get", "--output=json", *arguments).encode())

    def _kubectl(self, *arguments: str) -> str:
        return self._system.run("kubectl", f"--kubeconfig={self._kubeconfig}", *arguments, timeout=KUBECTL_LIMIT)
