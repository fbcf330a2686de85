"""Says which changes of the configuration or of the host have no effect on nodes that exist already."""

from collections.abc import Iterable
from contextlib import suppress

from agent.config.settings import Config
from agent.host.provision.host_goal import NO_SWAP, host_goal
from agent.host.provision.inputs import changed_inputs, node_names
from agent.host.provision.observe import NodeFacts
from agent.host.provision.record import OF_REGISTRATION, SWAP, NodeRecord, changed_settings
from agent.model.as_found import AsFound
from agent.model.errors import AgentError
from agent.model.facts import Seen
from agent.system.files import System


def node_remark(node: NodeFacts, config: Config, system: System) -> str:
    """Return which settings and inputs have changed since a node was made, and what to do; empty if none has."""
    changed = (*_changed(node, config), *_changed_inputs(node, config, system))
    if not changed or not isinstance(node.record, NodeRecord):
        return ""
    name, again = node.record.node, f"run `unbounded-agent up --rebuild {node.machine}`"
    if not set(OF_REGISTRATION).isdisjoint(changed):
        delete = f"first run `kubectl delete node {name}`, because an existing Node keeps its labels and taints"
        again = f"{delete}; then {again}"
    elif _name(node.machine, config, system) not in ("", name):
        again += f", then `kubectl delete node {name}`: it joins as another Node"
    return f"node {name} was made with other settings: {', '.join(changed)}; {again}"


def swap_remark(nodes: Iterable[NodeFacts], found: Seen[AsFound], config: Config, system: System) -> str:
    """Return a sentence if the settings now keep swap, but an earlier `up` has turned swap off.

    The sentence says that swap stays off, and how to turn it on. Otherwise, return an empty string. Also return an
    empty string if a node was made with host.swap = "off": its kubelet would refuse swap, and `node_remark` says what
    to do.
    """
    files = found.host.files if isinstance(found, AsFound) else {}
    ours = NO_SWAP in files and files[NO_SWAP] is None and system.exists(NO_SWAP)
    if not ours or host_goal(config).swap_off or any(SWAP in _changed(node, config) for node in nodes):
        return ""
    return (
        f'host.swap is "keep", but swap stays off, as an earlier `up` left it: to use it again, run `rm {NO_SWAP} && '
        "systemctl daemon-reload && systemctl start swap.target`"
    )


def _name(machine: str, config: Config, system: System) -> str:
    """Return the name that the Node of a machine would get now; empty if it is unknown."""
    with suppress(AgentError, OSError):
        return node_names(config, system)[machine]
    return ""


def _changed(node: NodeFacts, config: Config) -> tuple[str, ...]:
    settings = config.machines[node.machine].node
    return changed_settings(node.record, settings) if settings and isinstance(node.record, NodeRecord) else ()


def _changed_inputs(node: NodeFacts, config: Config, system: System) -> tuple[str, ...]:
    return changed_inputs(node.record, node.machine, config, system) if isinstance(node.record, NodeRecord) else ()
