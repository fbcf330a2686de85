"""`unbounded-agent kube`: the manifests that come with the agent, and the move of a node to DRA or back."""

import argparse
import os

from agent.cli.host import settings_of
from agent.cli.output import table
from agent.cli.printing import say
from agent.host.allocation import DIRECTORY, SUFFIX, Move, Node, recorded_node, steps
from agent.host.reconcile import Reconciler
from agent.host.state.locks import machine_locks
from agent.machine.vendors import VENDORS
from agent.model.device import gives_gpus
from agent.model.errors import AgentError, ConfigError


def manifests(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print the manifests of these names one after the other, or list all manifests if there are no names.

    With a directory, write the manifests there instead: those of these names, or all if there are no names. Raises
    ConfigError for an unknown name, and AgentError if a file there has other content: somebody may have edited it.
    """
    system, names = reconciler.system, options.names
    known = [each.removesuffix(SUFFIX) for each in system.entries(DIRECTORY)]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no manifest {', '.join(unknown)}: choose from {', '.join(known)}")
    texts = {name: system.read_text(f"{DIRECTORY}/{name}{SUFFIX}") for name in names or known}
    if options.out is None:
        purposes = [(name, text.splitlines()[0].removeprefix("# ")) for name, text in texts.items()]
        say(["---\n".join(texts.values()).rstrip("\n")] if names else table(purposes))
        return 0
    contents = {f"{os.path.abspath(options.out)}/{name}{SUFFIX}": text.encode() for name, text in texts.items()}
    if changed := [path for path, each in contents.items() if system.exists(path) and system.read(path) != each]:
        raise AgentError(
            f"nothing was written, because these files have other content, perhaps edited: {', '.join(changed)}",
            "write into an empty directory, and compare the two with `diff -ru`; to replace a file, remove it first",
        )
    for path, content in contents.items():
        system.write(path, content)
        say([path])
    return 0


def allocation(options: argparse.Namespace, reconciler: Reconciler) -> int:
    """Print the steps or, with a kubeconfig, take those that need only the cluster's API.

    Return 1 if the user must take a step before the move can go on: in the machine, in the configuration, or with other
    users' pods. Otherwise, return 0.
    """
    machines = reconciler.config.machines
    machine = options.machine or (next(iter(machines)) if len(machines) == 1 else "")
    if not machine:
        hint = f"`unbounded-agent kube allocation {options.to} MACHINE`"
        raise ConfigError(f"which machine? configured: {', '.join(machines) or 'none'}", hint)
    settings_of(machine, reconciler.config)
    if not options.kubeconfig:
        # The cluster is not observed. So the steps have NODE and RESOURCE (the device plugin's resource), which the
        # user must replace. The resource's count is unknown: it is 0 here, because a count of 0 is not printed.
        node = Node(options.node or "NODE", False, False, True, {}, {"RESOURCE": "0"}, (), (), ())
        listed = steps(options.to, machine, node, reconciler, reconciler.preview()[0])
        say(line for number, step in enumerate(listed, start=1) for line in step.lines(number))
        return 0
    # The name that `up` recorded, not the one that the machine reports: root in the machine could name another node.
    node_name = options.node or recorded_node(machine, reconciler.system, "name it with --node NODE")
    with machine_locks(reconciler.system, (machine,), "kube allocation"):
        return 0 if Move(options.to, machine, node_name, options.kubeconfig, reconciler, _gives_gpus, say).run() else 1


def _gives_gpus(resource: str) -> bool:
    return any(gives_gpus(resource, each.resource_prefix, each.harmless_resources) for each in VENDORS.values())
