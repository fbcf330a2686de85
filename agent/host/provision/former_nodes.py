"""Checks whether a node would conflict with a former node: one that `up` made and that is no longer configured."""

from collections.abc import Iterator

from agent.config.settings import Config
from agent.host.plan.nspawn import own_network
from agent.host.provision.inputs import node_names
from agent.host.provision.kubelet_files import NETWORK_WANTED
from agent.host.provision.observe import made_nodes, observe_node
from agent.host.provision.preflight import Check
from agent.host.provision.record import NodeRecord
from agent.model.errors import AgentError
from agent.model.facts import Absent
from agent.system.files import System


def check_former_nodes(machine: str, config: Config, system: System) -> Iterator[Check]:
    """Yield a failed check for each former node with which the machine's node would conflict.

    The two conflict if both kubelets would be the same Node, or would need the same ports. A former node may still run:
    if somebody renames a machine's table in the configuration, for example, the agent lets the machine with the former
    name run, and the host starts that machine at each boot.
    """
    try:
        name = node_names(config, system)[machine]
    except (AgentError, OSError):
        # Another check says why there is no name.
        return
    shared = not own_network(config.machines[machine].nspawn)
    for other in made_nodes(system):
        settings = config.machines.get(other)
        facts = observe_node(other, system)
        if (settings and settings.node) or isinstance(facts.root, Absent) or not isinstance(facts.record, NodeRecord):
            continue
        if facts.record.node == name:
            what = f"is the node {name}"
        elif shared and NETWORK_WANTED not in facts.record.files:
            what = "is a node on the host's network"
        else:
            continue
        message = f"machine {other}, which `up` made, {what}, too, although it is no longer configured as a node"
        advice = f"drain it and run `unbounded-agent reset {other}` first, or put its settings back"
        yield Check("former nodes", message, advice, machine)
