"""The record of a node that `up` made: what its root file system was made from, and with which settings."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from msgspec import to_builtins

from agent.config.node import NodeSettings
from agent.host.provision.durable import Durable
from agent.host.provision.kubelet_files import NodeInputs
from agent.model.digest import sha256
from agent.model.facts import Seen
from agent.model.node import NodeBinary, NodeFile, NodeImage
from agent.model.paths import node_record

NOT_IN_ROOT = (
    "bootstrap_token",
    "image.credentials",
    "image.ca_directory",
    "image.mirror",
    "image.signature_policy",
    "binaries.mirror",
    "binaries.github_mirror",
    "binaries.bundle",
)
"""Settings that decide how a root file system is made, but not what is in it. If one of them changes, no rebuild is
needed."""
OF_REGISTRATION = ("kubelet.gpu_labels", "kubelet.labels", "kubelet.startup_taint", "kubelet.taints")
"""Settings that a kubelet applies only when it registers a new Node (--node-labels in kubelet(1))."""
HOST_SETTINGS = "host."
"""The prefix of settings that are applied to the host. If one of them changes, other than SWAP, no rebuild is needed
either."""
SWAP = "host.swap"
"""The only setting of the host that the root file system also depends on: the kubelet's failSwapOn follows it."""


@dataclass(frozen=True)
class NodeRecord:
    """The whole record."""

    node: str
    """Name of the Node object."""
    image: NodeImage
    inode: int
    """Inode number of the root directory. A directory with another number was not made by `up`; see `born`."""
    binaries: dict[str, str]
    """SHA-256 digests of the fetched files, which are programs or archives of programs, by path in the machine."""
    files: dict[str, str]
    """SHA-256 digests of the files that `up` wrote, by path in the machine."""
    settings: dict[str, str]
    """The settings that the root file system depends on, as JSON by key."""
    made: float
    """When the root file system was complete, in seconds since the epoch."""
    born: int = 0
    """When the root directory was made, in nanoseconds since the epoch; 0 if unknown. The inode number alone proves
    nothing: once a directory is removed, a new one may get its number."""
    address: str = ""
    """The host's address that the kubelet uses; empty if the settings name one, or if the kubelet finds its own."""

    def is_of(self, inode: Seen[int], born: int) -> bool:
        """Return whether a directory is the one that `up` made. `born` is when the directory was made; 0 if unknown."""
        return inode == self.inode and (born == self.born or not born or not self.born)


NODE_RECORDS = Durable(NodeRecord)


def record_paths(machine: str) -> tuple[str, str]:
    """Return the paths of the two copies of a machine's record, in the order of writing."""
    path = node_record(machine)
    return path, f"{path.removesuffix('.json')}.copy.json"


def make_record(
    settings: NodeSettings,
    inputs: NodeInputs,
    image: NodeImage,
    binaries: Iterable[NodeBinary],
    files: Iterable[NodeFile],
) -> NodeRecord:
    """Return the record of a root file system. Its `inode`, `made` and `born` are unset.

    They are set when the root file system is complete.
    """
    return NodeRecord(
        node=inputs.name,
        image=image,
        inode=0,
        binaries={each.path: each.sha256 for each in binaries},
        files={each.path: sha256(each.content) for each in files},
        settings=settings_of_root(settings),
        made=0.0,
        address="" if settings.kubelet.node_ip else inputs.address,
    )


def settings_of_root(settings: NodeSettings) -> dict[str, str]:
    """Return the settings that the root file system depends on, as JSON by key."""
    flat = dict(_flat("", to_builtins(settings)))
    for key in flat.keys() - {SWAP}:
        if key in NOT_IN_ROOT or key.startswith(HOST_SETTINGS):
            del flat[key]
    return flat


def changed_settings(record: NodeRecord, settings: NodeSettings) -> tuple[str, ...]:
    """Return the keys of settings whose values differ from those that the node was made with."""
    wanted, made = settings_of_root(settings), record.settings
    return tuple(sorted(key for key in {*wanted, *made} if wanted.get(key) != made.get(key)))


def _flat(prefix: str, settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        # A table within a table, such as labels, counts as one value: users choose its keys, which may contain dots.
        if isinstance(value, dict) and not prefix:
            yield from _flat(f"{key}.", value)
        else:
            yield f"{prefix}{key}", json.dumps(value, sort_keys=True)
