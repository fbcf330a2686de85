"""Collects what a node's files contain apart from its settings: the Node's name, its addresses, the CA."""

from collections.abc import Callable
from contextlib import suppress

from agent.config.kubernetes_names import is_subdomain
from agent.config.node import NodeSettings
from agent.config.settings import Config
from agent.host.plan.nspawn import own_network
from agent.host.provision.kubelet_files import CA_FILE, NETWORK_WANTED, NodeInputs
from agent.host.provision.record import NodeRecord
from agent.model.digest import sha256
from agent.model.errors import AgentError, ConfigError
from agent.system.default_route import default_address, has_address
from agent.system.files import System

HOST_NAME = "/proc/sys/kernel/hostname"
NAME_LIMIT = 63
"""Characters of a Node's name. The API allows more, but the kubelet also writes it into the label
kubernetes.io/hostname, whose value may have only so many."""
CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


def node_inputs(
    machine: str,
    config: Config,
    system: System,
    address: Callable[[], str] = default_address,
) -> NodeInputs:
    """Return the inputs of a machine's node, without the labels for its GPUs. Raises AgentError or OSError."""
    settings = config.machines[machine]
    node = settings.node
    assert node, "the machine is a node"
    own, name = own_network(settings.nspawn), node_names(config, system)[machine]
    if len(name) > NAME_LIMIT:
        whose = f"machines.{machine}.node.name" if node.name else "the name of the host"
        raise ConfigError(
            f"{whose}, {name}, has {len(name)} characters, and no Node with more than {NAME_LIMIT} can register",
            f"set machines.{machine}.node.name to a shorter one",
        )
    return NodeInputs(
        name=name,
        address=node.kubelet.node_ip or ("" if own else address()),
        ca=_ca(node, system),
        own_network=own,
    )


def changed_inputs(
    record: NodeRecord,
    machine: str,
    config: Config,
    system: System,
    address: Callable[[], str] = default_address,
    has_address: Callable[[str], bool] = has_address,
) -> tuple[str, ...]:
    """Return in words which of a node's inputs have changed since `up` made the node. Settings are not compared here.

    An input that cannot be observed now is left out.
    """
    settings = config.machines[machine]
    node = settings.node
    assert node, "the machine is a node"
    changed = []
    with suppress(AgentError, OSError):
        if record.files.get(CA_FILE) not in (None, sha256(_ca(node, system))):
            changed.append("the content of ca_file")
    with suppress(AgentError, OSError):
        if not node.name and record.node != (name := _host_name(machine, system)):
            changed.append(f"the host's name, now {name}")
    if own_network(settings.nspawn) != (NETWORK_WANTED in record.files):
        changed.append("whether the machine is on the host's network")
    elif record.address and not node.kubelet.node_ip:
        # If the host still has the recorded address, the address counts as unchanged, even if the default route now
        # uses another address.
        with suppress(AgentError, OSError):
            if not has_address(record.address):
                changed.append(f"the host's address, now {address()}")
    return tuple(changed)


def node_names(config: Config, system: System) -> dict[str, str]:
    """Return the names of Node objects, by the name of the machine that is the node.

    Raises ConfigError, for example if two machines would have the same Node.
    """
    names: dict[str, str] = {}
    for machine, settings in config.machines.items():
        if not settings.node:
            continue
        name = settings.node.name or _host_name(machine, system)
        if other := next((each for each, taken in names.items() if taken == name), ""):
            raise ConfigError(
                f"machines {other} and {machine} would both be the node {name}",
                f"set machines.{machine}.node.name",
            )
        names[machine] = name
    return names


def _host_name(machine: str, system: System) -> str:
    name = system.read_text(HOST_NAME).strip().lower()
    if not is_subdomain(name) or name == "localhost":
        raise ConfigError(f"the host's name {name!r} cannot be a node's name", f"set machines.{machine}.node.name")
    return name


def _ca(node: NodeSettings, system: System) -> bytes:
    """Return the CA certificates that the machine gets. Raises ConfigError."""
    try:
        content = system.read(node.ca_file)
    except OSError as error:
        raise ConfigError(
            f"{node.ca_file}: cannot read it: {error.strerror}", "write the cluster's CA there"
        ) from error
    if CERTIFICATE not in content:
        raise ConfigError(f"{node.ca_file}: no certificate in PEM format", "write the cluster's CA certificate there")
    if b"PRIVATE KEY-----" in content:
        raise ConfigError(f"{node.ca_file}: it has a private key, which no node may get", "remove the key from it")
    return content
