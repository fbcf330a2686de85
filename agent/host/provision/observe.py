"""Observes what `up` and `reset` act on: root file systems, records and units.

Opens no file in a root file system.
"""

import stat
from collections.abc import Mapping

from msgspec import Struct

from agent.host.observe.joined import observe_joined
from agent.host.observe.units import is_enabled
from agent.host.provision.actions import boot_units
from agent.host.provision.durable import Durable
from agent.host.provision.record import NODE_RECORDS, NodeRecord, record_paths
from agent.model.as_found import AsFound
from agent.model.facts import Absent, Broken, Seen, Unseen
from agent.model.paths import AS_FOUND, MACHINE_ROOTS, NODES, PARTIAL, machine_root, staged_prefix, token_file
from agent.system.files import System
from agent.system.seen import read_seen

HOST_RECORD = Durable(AsFound)
COPY = ".copy.json"


class NodeFacts(Struct, frozen=True):
    """What was observed of one machine that `up` makes, or has made."""

    machine: str
    root: Seen[int]
    """Inode number of its root directory; Broken if that path is not a directory."""
    record: Seen[NodeRecord]
    staged: tuple[str, ...]
    """Paths that interrupted attempts left: root file systems, complete or not, that had not become the machine's yet;
    root file systems that were being removed; directories in which an image was being pulled or unpacked."""
    enabled: Mapping[str, bool]
    """Whether each unit of `boot_units` is enabled, by the unit's name."""
    joined: str
    """Name of the machine's Node object; empty if its kubelet has not joined since the machine's last start."""
    born: int = 0
    """When its root directory was made, in nanoseconds since the epoch; 0 if unknown."""
    has_token: bool = False
    """Whether the machine has a bootstrap token, which is removed once the kubelet has joined."""

    @property
    def unjoined(self) -> bool:
        """Whether the machine still needs a valid bootstrap token, as far as the host knows."""
        return self.has_token and not self.joined


def observe_node(machine: str, system: System) -> NodeFacts:
    """Return the facts of one machine. Raises OSError, for example if MACHINE_ROOTS cannot be listed."""
    return NodeFacts(
        machine=machine,
        root=_root(machine, system),
        record=NODE_RECORDS.read(record_paths(machine), system),
        staged=_staged(machine, system),
        enabled={unit: is_enabled(unit, system) for unit in boot_units(machine)},
        joined=observe_joined(machine, system),
        born=_born(machine, system),
        has_token=system.exists(token_file(machine)),
    )


def observe_found(system: System) -> Seen[AsFound]:
    """Return the record of the host as it was found."""
    return HOST_RECORD.read(AS_FOUND, system)


def made_nodes(system: System) -> tuple[str, ...]:
    """Return the machines that have a record. Raises OSError if the records cannot be listed."""
    try:
        names = system.entries(NODES)
    except FileNotFoundError:
        return ()
    records = [name for name in names if name.endswith(".json") and not name.startswith(".")]
    # A machine named x.copy has the record x.copy..json (node_record), so `base` may end in a dot.
    bases = {name.removesuffix(COPY if name.endswith(COPY) else ".json") for name in records}
    return tuple(sorted(base.removesuffix(".") for base in bases))


def _root(machine: str, system: System) -> Seen[int]:
    path = machine_root(machine)
    found = read_seen(system.owner, path)
    if isinstance(found, Absent | Broken | Unseen):
        return found
    if not stat.S_ISDIR(found[0]):
        return Broken(f"{path} is not a directory")
    inode = system.link_inode(path)
    return Absent(f"{path} does not exist") if inode is None else inode


def _born(machine: str, system: System) -> int:
    try:
        return system.birth(machine_root(machine))
    except OSError:
        return 0


def _staged(machine: str, system: System) -> tuple[str, ...]:
    prefix = staged_prefix(machine)
    try:
        names = system.entries(MACHINE_ROOTS)
    except FileNotFoundError:
        return ()
    paths = (path for name in names if (path := f"{MACHINE_ROOTS}/{name}").startswith(prefix))
    # If a path contains a dot after the prefix, the path belongs to another machine: one whose name begins with this
    # machine's name and `.unbounded-agent-`.
    return tuple(path for path in paths if "." not in path.removeprefix(prefix).removesuffix(PARTIAL))
