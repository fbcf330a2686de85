"""Compares what exists with what a node needs, and returns the steps of `up` and `reset`. Pure."""

import posixpath
from collections.abc import Callable, Mapping

from msgspec import Struct

from agent.host.provision.actions import (
    Action,
    ChangeHost,
    DisableUnit,
    EnableUnit,
    FetchBinaries,
    FillRoot,
    ForgetHost,
    ForgetNode,
    GiveToken,
    PublishRoot,
    RecordHost,
    RemoveEmptyDirectory,
    RemoveLeftover,
    RemoveRoot,
    RemoveTree,
    RestoreHost,
    StageRoot,
    StopMachine,
)
from agent.host.provision.differences import needs_restoring
from agent.host.provision.leftovers import Leftovers
from agent.host.provision.observe import NodeFacts
from agent.host.provision.record import NodeRecord
from agent.model.as_found import AsFound
from agent.model.digest import sha256
from agent.model.facts import Absent, Broken, Seen, Unseen
from agent.model.network import Network
from agent.model.node import HostSettings, HostState, NodeBinary, NodeFile, NodeImage, Problem
from agent.model.paths import AS_FOUND, machine_root, machine_unit, node_record, staged_root, unit_drop_in


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


class RootGoal(Struct, frozen=True):
    """What a root file system is made from."""

    image: NodeImage
    binaries: tuple[NodeBinary, ...]
    files: tuple[NodeFile, ...]
    record: NodeRecord
    token: str = ""
    """Where the bootstrap token is; empty if the node joins without one."""


class RootSteps(Struct, frozen=True):
    """The steps that make a root file system."""

    first: tuple[Action, ...]
    parallel: tuple[Action, ...]
    """Steps that do not depend on each other."""
    last: tuple[Action, ...]


def must_make_root(facts: NodeFacts, *, rebuild: bool = False) -> bool | Problem:
    """Return whether the root file system must be made. If `up` must not touch what is there, return a Problem."""
    path, again = machine_root(facts.machine), f"run `unbounded-agent up --rebuild {facts.machine}`"
    inode, record = facts.root, facts.record
    if isinstance(inode, Unseen | Broken):
        return Problem("root", inode.why, "correct this, then run `unbounded-agent up` again")
    if isinstance(inode, Absent):
        return True
    if isinstance(record, Absent):
        return Problem(
            "root", f"{path} exists, and `up` did not make it", "move it to another place, or use another name"
        )
    if rebuild:
        return True
    if isinstance(record, Broken | Unseen):
        return Problem("record", record.why, f"restore {node_record(facts.machine)} from a backup, or {again}")
    if not record.is_of(inode, facts.born):
        return Problem("root", f"{path} was replaced since `up` made it", again)
    return False


def plan_host(goal: HostSettings, facts: HostFacts, now: float, *, changes: bool) -> tuple[Action, ...] | Problem:
    """Return the steps that make or extend the record of the host as it was found, and then change the host.

    `changes` says whether the host differs from the goal. If it does not, there is no step that changes the host. If
    the record is damaged, or is missing although a node was made, this returns a Problem: such a record is never
    replaced.
    """
    steps: list[Action] = []
    match facts.found:
        case AsFound() as found:
            recorded = found.extended(facts.state, facts.units)
            # `!=` ignores modules, so compare them separately.
            more = recorded != found or recorded.host.modules != found.host.modules
            steps += [RecordHost(recorded)] if more else []
        case Absent() if not facts.others:
            steps.append(RecordHost(AsFound(facts.state, facts.units, facts.network, now)))
        case Absent():
            return _unknown_host(f"{AS_FOUND[0]} is missing, although there are nodes: {', '.join(facts.others)}")
        case Broken(why) | Unseen(why):
            return _unknown_host(why)
    return (*steps, *([ChangeHost(goal, facts.state)] if changes else []))


def plan_root(goal: RootGoal, facts: NodeFacts) -> RootSteps:
    """Return the steps that make a root file system. An old one stays in use until the new one is complete."""
    unpacked, staged = staged_root(facts.machine, goal.image.digest), staged_root(facts.machine, _digest(goal))
    # `unpacked` has only the image's files. FillRoot renames it to `staged`, then adds programs and files. If an
    # interrupted attempt left one of the two, continue with it.
    usable = staged if staged in facts.staged else unpacked
    stale = tuple(RemoveTree(path) for path in facts.staged if path != usable)
    fetch: list[Action] = [] if usable in facts.staged else [StageRoot(goal.image, unpacked)]
    fetch += [FetchBinaries(goal.binaries)] if goal.binaries else []
    last: list[Action] = [FillRoot(unpacked, staged, goal.binaries, goal.files)]
    if not isinstance(facts.root, Absent):
        last += [StopMachine(facts.machine), RemoveRoot(facts.machine)]
    # Give the token before the root file system gets its final name: with that name, the node exists and needs a token.
    last += [GiveToken(facts.machine, goal.token)] if goal.token else []
    return RootSteps(stale, tuple(fetch), (*last, PublishRoot(facts.machine, staged, goal.record)))


def _digest(goal: RootGoal) -> str:
    """Return a digest of the image, of the programs, and of the paths of the files in a root file system.

    If an attempt was interrupted while it filled a root file system, a later attempt continues with that root file
    system only if this digest is the same. The later attempt writes all files again, so the files' contents need not be
    the same, and are not in the digest.
    """
    programs = [(each.path, each.sha256) for each in goal.binaries]
    contents = (goal.image.digest, programs, [each.path for each in goal.files])
    return sha256(repr(contents).encode())


def plan_boot(facts: NodeFacts) -> tuple[Action, ...]:
    """Return the steps that let the machine start with the host, even without the agent."""
    return tuple(EnableUnit(unit) for unit, enabled in facts.enabled.items() if not enabled)


def plan_removal(facts: NodeFacts, unit_state: Seen[str]) -> tuple[Action, ...] | Problem:
    """Return the first steps of `reset`, which stop the machine and remove its root file system.

    Returns a Problem if `reset` must not remove what is there.
    """
    path, absent = machine_root(facts.machine), isinstance(facts.root, Absent)
    for kind, fact in (("record", facts.record), ("root", facts.root)):
        if isinstance(fact, Unseen):
            return Problem(kind, fact.why, "correct this, then run `unbounded-agent reset` again")
    if isinstance(facts.record, Broken) and not absent:
        advice = f"restore {node_record(facts.machine)} from a backup, or stop the machine and remove {path} yourself"
        again = f"{advice}; then run `unbounded-agent reset` again"
        return Problem("record", f"it is unknown what `up` made: {facts.record.why}", again)
    if isinstance(facts.record, Absent) and not absent:
        return Problem("root", f"`up` did not make {path}", "stop the machine and remove the directory yourself")
    if isinstance(facts.record, NodeRecord) and not absent and not facts.record.is_of(facts.root, facts.born):
        advice = "move it to another place, then run `unbounded-agent reset` again"
        return Problem("root", f"{path} was replaced since `up` made it", advice)
    steps: list[Action] = []
    unit = machine_unit(facts.machine)
    # Even a damaged record proves that `up` made the machine. If the record is damaged, the root file system is absent
    # (checked above), so nothing else in the record is needed.
    made_by_up = not isinstance(facts.record, Absent)
    if facts.enabled.get(unit) and made_by_up:
        steps.append(DisableUnit(unit))
    if made_by_up and unit_state not in ("inactive", "failed") and not isinstance(unit_state, Absent):
        steps.append(StopMachine(facts.machine))
    if not absent:
        steps.append(RemoveRoot(facts.machine))
    return (*steps, *(RemoveTree(path) for path in facts.staged))


def plan_tidying(machine: str, exists: Callable[[str], bool]) -> tuple[Action, ...]:
    """Return the steps that remove the directory in which the agent's drop-in for the machine's unit was."""
    directory = posixpath.dirname(unit_drop_in(machine))
    return (RemoveEmptyDirectory(directory),) if exists(directory) else ()


def plan_restoration(facts: HostFacts, left: Leftovers) -> tuple[Action, ...] | Problem:
    """Return the steps of `reset` that restore the host.

    There are none while another node needs the host's settings, or if there is no record of the former settings.
    Returns a Problem if the record of the host's former settings is damaged or cannot be read.
    """
    if facts.others or isinstance(facts.found, Absent):
        return ()
    if isinstance(facts.found, Broken | Unseen):
        return _unknown_host(facts.found.why)
    found = facts.found
    units = [DisableUnit(unit) for unit, on in facts.units.items() if on and found.units.get(unit) is False]
    settings = [RestoreHost(found.host, facts.state)] if needs_restoring(found.host, facts.state) else []
    return (*units, *settings, *(RemoveLeftover(each) for each in left.remove))


def plan_forgetting(machine: str, facts: HostFacts) -> tuple[Action, ...]:
    """Return the last steps of `reset`, which remove the records. Until they have run, `reset` can be repeated."""
    return (ForgetNode(machine), *((ForgetHost(),) if not facts.others and not isinstance(facts.found, Absent) else ()))


def _unknown_host(why: str) -> Problem:
    advice = f"restore {AS_FOUND[0]} from a backup; without it, the host's original settings are unknown"
    return Problem("record", f"it is unknown how the host was before its first node: {why}", advice)
