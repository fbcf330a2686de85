"""Compares what exists with what a node needs, and returns the steps of `up` and `reset`. Pure."""

import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from agent.config.settings import ImageSettings
from agent.host.observe.machine import is_enabled, observe_joined
from agent.host.provision.host_settings import differs, refuse_foreign
from agent.host.provision.network import Leftovers
from agent.host.provision.node_files import NODE_RECORDS, NodeRecord, record_paths
from agent.host.state.records import Durable
from agent.host.state.switches import Switch
from agent.model.errors import AgentError
from agent.model.facts import Absent, Broken, Seen, Unseen
from agent.model.goal import Step
from agent.model.node import AsFound, HostSettings, HostState, Leftover, Network, NodeBinary, NodeFile, NodeImage
from agent.model.paths import (
    AS_FOUND,
    MACHINE_ROOTS,
    NODES,
    PARTIAL,
    candidate_of,
    machine_root,
    machine_unit,
    node_record,
    staged_prefix,
    staged_root,
    token_file,
)
from agent.model.text import sha256
from agent.system.files import System
from agent.system.trust import read_seen

# Steps of `up` and `reset`. Data only: agent.host.provision.apply has their performers.


class NodeStep(Step, frozen=True):
    decisive = True


class RecordHost(NodeStep, frozen=True):
    kind = "write"
    words = "record the host as it was found"
    found: AsFound


class ChangeHost(NodeStep, frozen=True):
    kind = "change"
    words = "change the host's settings for the kubelet"
    together = True
    goal: HostSettings
    before: HostState


class StageRoot(NodeStep, frozen=True):
    """Pull the image and unpack it into the directory `staged`, which is not a machine yet.

    The FillRoot that follows calls this directory `unpacked`. What FillRoot calls `staged` is another directory.
    """

    kind = "stage"
    together = True
    settings: ImageSettings
    image: NodeImage
    staged: str

    def describe(self) -> str:
        # `plan` does not ask the registry for the size.
        size = f" ({self.image.size / 1e6:.0f} MB compressed)" if self.image.size else ""
        return f"pull and unpack {self.image.name}{size}"


class FetchBinaries(NodeStep, frozen=True):
    """Download the node's programs, or take them from the offline bundle, and verify them."""

    kind = "stage"
    together = True
    binaries: tuple[NodeBinary, ...]

    def describe(self) -> str:
        return f"fetch {', '.join(each.name for each in self.binaries)}"


class FillRoot(NodeStep, frozen=True):
    """Rename the unpacked root file system to `staged`, then put programs and files into it."""

    kind = "write"
    unpacked: str
    staged: str
    binaries: tuple[NodeBinary, ...]
    files: tuple[NodeFile, ...]

    def describe(self) -> str:
        programs = ", ".join(each.name for each in self.binaries) or "no programs"
        return f"put {programs} and {len(self.files)} files into the root file system"


class StopMachine(NodeStep, frozen=True):
    """Stop a machine, and wait until it has stopped."""

    kind = "change"
    words = "stop machine {0.machine}"
    machine: str


class MakeCarried(NodeStep, frozen=True):
    """Make the directories that the machine keeps outside of its root file system, unless an earlier root had them."""

    kind = "write"
    words = "make {0.machine}'s directories of node.carry"
    machine: str
    paths: tuple[str, ...]


class PublishRoot(NodeStep, frozen=True):
    """Record the node, and give the complete root file system its final name."""

    kind = "write"
    words = f"make {MACHINE_ROOTS}/{{0.machine}} from the complete root file system"
    machine: str
    staged: str
    record: NodeRecord


class RecordSwitch(NodeStep, frozen=True):
    """Record how far a switch to another root file system has come."""

    kind = "write"
    machine: str
    switch: Switch

    def describe(self) -> str:
        return f"record the switch of machine {self.machine} to {self.switch.image}: {self.switch.state}"


class PublishCandidate(NodeStep, frozen=True):
    """Record the next root file system of a machine, and give it the name under which it boots as a candidate."""

    kind = "write"
    words = "make a candidate for machine {0.machine} from the complete root file system"
    machine: str
    staged: str
    record: NodeRecord


class PutAside(NodeStep, frozen=True):
    """Take the name of a candidate from its root file system, so that nothing can start it."""

    kind = "write"
    words = "put the candidate's root file system aside"
    machine: str


class UseAgain(NodeStep, frozen=True):
    """Let the root file system that was put aside be the candidate."""

    kind = "write"
    words = "use the root file system that an earlier attempt has made"
    machine: str


class KeepIdentity(NodeStep, frozen=True):
    """Copy the certificates of a stopped machine's kubelet to the host, unless they are there already."""

    kind = "write"
    words = "keep the certificates of the kubelet outside of the root file system"
    machine: str


class ExchangeRoots(NodeStep, frozen=True):
    """Give a stopped machine its `next` root file system, or its `former` one again. Both exist at each moment."""

    kind = "change"
    words = "give machine {0.machine} its {0.active} root file system"
    machine: str
    active: Literal["next", "former"]


class ForgetCandidate(NodeStep, frozen=True):
    """Remove the agent's state of a candidate that no longer runs."""

    kind = "remove"
    words = "remove the agent's state of the candidate"
    machine: str


class GiveToken(NodeStep, frozen=True):
    """Give a bootstrap token to a machine that has not joined its cluster. This token replaces an earlier one."""

    kind = "write"
    words = "give machine {0.machine} the bootstrap token of {0.where}"
    machine: str
    where: str
    """The token's file, or `credential:NAME`."""


class RemoveTree(NodeStep, frozen=True):
    """Remove a root file system that is not a machine yet, or no longer is one."""

    kind = "remove"
    words = "remove {0.path}"
    path: str


class RemoveRoot(NodeStep, frozen=True):
    """Remove a machine's root file system."""

    kind = "remove"
    words = "remove {0.path}"
    machine: str

    @property
    def path(self) -> str:
        return machine_root(self.machine)


class RemoveEmptyDirectory(NodeStep, frozen=True):
    """Remove a directory that was made for one of the agent's files, unless others have put files there."""

    kind = "remove"
    words = "remove {0.path}"
    path: str


class RemoveDriverRoots(NodeStep, frozen=True):
    """Remove all staged drivers, which no machine needs any longer."""

    kind = "remove"
    words = "remove the staged drivers"


class ChangeUnit(NodeStep, frozen=True):
    """Let the host start a unit at each boot, even without the agent, or no longer."""

    kind = "change"
    words = "{0.verb} {0.unit}"
    verb: Literal["enable", "disable"]
    unit: str


class ForgetNode(NodeStep, frozen=True):
    """Remove the agent's state of a machine. The record of the node is removed last."""

    kind = "remove"
    words = "remove the agent's state of machine {0.machine}"
    machine: str


class RestoreHost(NodeStep, frozen=True):
    kind = "change"
    words = "restore the host's settings"
    found: HostState


class RemoveLeftover(NodeStep, frozen=True):
    """Remove what pods' networking left in the host's network."""

    kind = "remove"
    leftover: Leftover

    def describe(self) -> str:
        return f"remove {self.leftover.describe()}"


class ForgetHost(NodeStep, frozen=True):
    """Remove the cache of fetched programs, then the record of the host as it was found."""

    kind = "remove"
    words = "remove the fetched programs and the record of the host as it was found"


def boot_units(machine: str) -> tuple[str, str]:
    """Return the units that make a machine start with the host: its own unit, and the target that starts that unit."""
    return machine_unit(machine), "machines.target"


# Observes what `up` and `reset` act on: root file systems, records and units. Opens no file in a root file system.


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
    unjoined: bool = False
    """Whether the machine still needs a valid bootstrap token, as far as the host knows."""
    born: int = 0
    """When its root directory was made, in nanoseconds since the epoch; 0 if unknown."""


def observe_node(machine: str, system: System) -> NodeFacts:
    """Return the facts of one machine. Raises OSError, for example if MACHINE_ROOTS cannot be listed."""
    path, prefix, born = machine_root(machine), staged_prefix(machine), 0
    root: Seen[int]
    found = read_seen(system.owner, path)
    if isinstance(found, Absent | Broken | Unseen):
        root = found
    elif stat.S_ISDIR(found[0]):
        root = system.link_inode(path) or Absent(f"{path} does not exist")
    else:
        root = Broken(f"{path} is not a directory")
    with suppress(OSError):
        born = system.birth(path)
    try:
        paths = [f"{MACHINE_ROOTS}/{name}" for name in system.entries(MACHINE_ROOTS)]
    except FileNotFoundError:
        paths = []
    # If a path contains a dot after the prefix, the path belongs to another machine: one whose name begins with this
    # machine's name and `.unbounded-agent-`.
    staged = (
        each for each in paths if each.startswith(prefix) and "." not in each.removeprefix(prefix).removesuffix(PARTIAL)
    )
    return NodeFacts(
        machine=machine,
        root=root,
        record=NODE_RECORDS.read(record_paths(machine), system),
        staged=tuple(staged),
        enabled={unit: is_enabled(unit, system) for unit in boot_units(machine)},
        unjoined=system.exists(token_file(machine)) and not observe_joined(machine, system),
        born=born,
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


class HostFacts(Struct, frozen=True):
    """What `up` and `reset` need to know of the host."""

    state: HostState
    units: Mapping[str, bool]
    """Whether each unit that `up` enables is enabled, by the unit's name. The machines' own units are left out."""
    network: Network
    found: Seen[AsFound]
    """The record of the host as it was found before its first node."""
    others: tuple[str, ...]
    """Machines that have a record. For `reset`, the machine that it removes is left out."""


def since_found(found: HostState, now: HostState) -> tuple[str, ...]:
    """Return what differs from the host as it was found, one sentence each.

    Three things are not compared. The first are modules, because `reset` leaves those that are in use. The second are
    parameters that did not exist when the host was found: a module brought them, and they stay as long as the module.
    The third are directories, because `reset` leaves those in which others have put files.
    """
    differences = [
        f"{name} {'does not exist' if current is None else f'is {current}'}, and was {value}"
        for name, value in found.sysctls.items()
        if value is not None and (current := now.sysctls.get(name)) != value
    ]
    swaps = {swap.path for swap in now.swaps}
    differences += [f"{swap.path} is no longer used as swap" for swap in found.swaps if swap.path not in swaps]
    for path, file in found.files.items():
        if now.files.get(path) != file:
            differences.append(f"{path} still exists" if file is None else f"{path} is not as it was")
    return tuple(differences)


def must_make_root(facts: NodeFacts, *, rebuild: bool = False) -> bool:
    """Return whether the root file system must be made. Raises AgentError if `up` must not touch what is there."""
    path, again = machine_root(facts.machine), f"run `unbounded-agent up --rebuild {facts.machine}`"
    inode, record = facts.root, facts.record
    if isinstance(inode, Unseen | Broken):
        raise AgentError(inode.why, "correct this, then run `unbounded-agent up` again")
    if isinstance(inode, Absent):
        return True
    if isinstance(record, Absent):
        move = "move it to another place, or use another name"
        raise AgentError(f"{path} exists, and `up` did not make it", move)
    if rebuild:
        return True
    if isinstance(record, Broken | Unseen):
        raise AgentError(record.why, f"restore {node_record(facts.machine)} from a backup, or {again}")
    if not record.is_of(inode, facts.born):
        raise AgentError(f"{path} was replaced since `up` made it", again)
    return False


def plan_host(goal: HostSettings, facts: HostFacts, now: float) -> tuple[NodeStep, ...]:
    """Return the steps that make or extend the record of the host as it was found, and then change the host.

    Raises AgentError if the record is damaged, or is missing although a node was made: it is never replaced then. Also
    raises it if a file of somebody else is in the place of one of the goal.
    """
    steps: list[NodeStep] = []
    refuse_foreign(goal, facts.state)
    match facts.found:
        case AsFound() as found:
            recorded = found.extended(facts.state, facts.units)
            steps += [RecordHost(recorded)] if recorded != found else []
        case Absent() if not facts.others:
            steps.append(RecordHost(AsFound(facts.state, facts.units, facts.network, now)))
        case Absent():
            raise _unknown_host(f"{AS_FOUND[0]} is missing, although there are nodes: {', '.join(facts.others)}")
        case Broken(why) | Unseen(why):
            raise _unknown_host(why)
    return (*steps, *([ChangeHost(goal, facts.state)] if differs(goal, facts.state) else []))


def plan_root(
    facts: NodeFacts,
    record: NodeRecord,
    binaries: tuple[NodeBinary, ...],
    files: tuple[NodeFile, ...],
    settings: ImageSettings,
    token: str = "",
    carry: tuple[str, ...] = (),
) -> tuple[NodeStep, ...]:
    """Return the steps that make a root file system. An old one stays in use until the new one is complete.

    `token` says where the bootstrap token is; it is empty if the node joins without one. `carry` is that of
    the settings.
    """
    machine, image = facts.machine, record.image
    # A root file system that an interrupted attempt has begun to fill is used only if this digest is the same. All
    # files are written again, so only their paths are in it.
    parts = (image.digest, [(each.path, each.sha256) for each in binaries], [each.path for each in files])
    unpacked, staged = staged_root(machine, image.digest), staged_root(machine, sha256(repr(parts).encode()))
    # `unpacked` has only the image's files. FillRoot renames it to `staged`, then adds programs and files. If an
    # interrupted attempt left one of the two, continue with it.
    usable = staged if staged in facts.staged else unpacked
    steps: list[NodeStep] = [RemoveTree(path) for path in facts.staged if path != usable]
    steps += [] if usable in facts.staged else [StageRoot(settings, image, unpacked)]
    steps += [FetchBinaries(binaries)] if binaries else []
    steps.append(FillRoot(unpacked, staged, binaries, files))
    if not isinstance(facts.root, Absent):
        steps += [StopMachine(machine), RemoveRoot(machine)]
    # Give the token before the root file system gets its final name: with that name, the node exists and needs a token.
    steps += [GiveToken(machine, token)] if token else []
    steps += [MakeCarried(machine, carry)] if carry else []
    return (*steps, PublishRoot(machine, staged, record))


def plan_candidate(
    facts: NodeFacts,
    record: NodeRecord,
    binaries: tuple[NodeBinary, ...],
    files: tuple[NodeFile, ...],
    settings: ImageSettings,
    *,
    usable: bool,
) -> tuple[NodeStep, ...]:
    """Return the steps that make a machine's candidate, without a change of the machine.

    `usable` says whether an earlier attempt has left a root file system with the same content, aside or as the
    candidate.
    """
    machine = facts.machine
    if usable:
        return (UseAgain(machine),)
    absent = replace(facts, root=Absent("the candidate has none yet"))
    *steps, publish = plan_root(absent, record, binaries, files, settings)
    assert isinstance(publish, PublishRoot), "the last step"
    candidate = machine_root(candidate_of(machine))
    return (*steps, RemoveTree(candidate), PublishCandidate(machine, publish.staged, record))


def plan_all(host: Sequence[NodeStep], roots: Iterable[NodeStep]) -> tuple[NodeStep, ...]:
    """Return the steps of `plan_host` and of all root file systems in the order of `up`.

    The host is recorded first. Its settings change while the first image is pulled; if none is, last.
    """
    first, change = [each for each in host if not each.together], [each for each in host if each.together]
    steps = [*roots]
    place = next((index for index, each in enumerate(steps) if isinstance(each, FillRoot)), len(steps))
    return (*first, *steps[:place], *change, *steps[place:])


def plan_boot(facts: NodeFacts) -> tuple[NodeStep, ...]:
    """Return the steps that let the machine start with the host, even without the agent."""
    return tuple(ChangeUnit("enable", unit) for unit, enabled in facts.enabled.items() if not enabled)


def plan_removal(facts: NodeFacts, unit_state: Seen[str]) -> tuple[NodeStep, ...]:
    """Return the first steps of `reset`, which stop the machine and remove its root file system.

    Raises AgentError if `reset` must not remove what is there.
    """
    path, absent, record = machine_root(facts.machine), isinstance(facts.root, Absent), facts.record
    again = "then run `unbounded-agent reset` again"
    for fact in (record, facts.root):
        if isinstance(fact, Unseen):
            raise AgentError(fact.why, f"correct this, {again}")
    match record:
        case Broken(why) if not absent:
            restore = f"restore {node_record(facts.machine)} from a backup"
            remove = f"{restore}, or stop the machine and remove {path} yourself; {again}"
            raise AgentError(f"it is unknown what `up` made: {why}", remove)
        case Absent() if not absent:
            raise AgentError(f"`up` did not make {path}", "stop the machine and remove the directory yourself")
        case NodeRecord() if not absent and not record.is_of(facts.root, facts.born):
            raise AgentError(f"{path} was replaced since `up` made it", f"move it to another place, {again}")
        case _:
            pass
    unit, steps = machine_unit(facts.machine), list[NodeStep]()
    # Even a damaged record proves that `up` made the machine. If the record is damaged, the root file system is absent
    # (checked above), so nothing else in the record is needed.
    if not isinstance(record, Absent):
        steps += [ChangeUnit("disable", unit)] if facts.enabled.get(unit) else []
        running = unit_state not in ("inactive", "failed") and not isinstance(unit_state, Absent)
        steps += [StopMachine(facts.machine)] if running else []
    steps += [] if absent else [RemoveRoot(facts.machine)]
    return (*steps, *(RemoveTree(path) for path in facts.staged))


def plan_restoration(facts: HostFacts, left: Leftovers) -> tuple[NodeStep, ...]:
    """Return the steps of `reset` that restore the host.

    There are none while another node needs the host's settings, or if there is no record of the former settings.
    Raises AgentError if the record of the host's former settings is damaged or cannot be read.
    """
    if facts.others or isinstance(facts.found, Absent):
        return ()
    if isinstance(facts.found, Broken | Unseen):
        raise _unknown_host(facts.found.why)
    found, before, now = facts.found, facts.found.host, facts.state
    units = [ChangeUnit("disable", unit) for unit, on in facts.units.items() if on and found.units.get(unit) is False]
    # Besides differences, `up` may have loaded modules and made directories.
    loaded = any(now.modules.get(module) for module, loaded in before.modules.items() if not loaded)
    made = not {*before.absent_directories} <= {*now.absent_directories}
    settings = [RestoreHost(before)] if loaded or made or since_found(before, now) else []
    return (*units, *settings, *(RemoveLeftover(each) for each in left.remove))


def plan_forgetting(machine: str, facts: HostFacts) -> tuple[NodeStep, ...]:
    """Return the last steps of `reset`, which remove the records. Until they have run, `reset` can be repeated."""
    return (ForgetNode(machine), *((ForgetHost(),) if not facts.others and not isinstance(facts.found, Absent) else ()))


def _unknown_host(why: str) -> AgentError:
    advice = f"restore {AS_FOUND[0]} from a backup; without it, the host's original settings are unknown"
    return AgentError(f"it is unknown how the host was before its first node: {why}", advice)
