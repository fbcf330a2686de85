"""Removes a node from the host. If it is the last node, also restores the host as it was before the first node."""

import posixpath
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from agent.host.apply.steps import Progress, apply
from agent.host.observe.machine import enabling_link, is_enabled, observe_units
from agent.host.provision import plan
from agent.host.provision.apply import performers
from agent.host.provision.host_settings import observe_host, restorable
from agent.host.provision.network import NO_LEFTOVERS, Leftovers, leftovers, observe_network
from agent.host.provision.node_files import NodeRecord, is_others_candidate
from agent.model.errors import AgentError
from agent.model.facts import Absent
from agent.model.node import AsFound, HostSettings, HostState, Network, NodeFile
from agent.model.paths import candidate_of, machine_root, machine_unit, unit_drop_in
from agent.system.copy import refuse_mounts
from agent.system.files import System
from agent.system.network import NetworkSource
from agent.system.trust import entries_if_present


class Ending(Struct, frozen=True):
    """What `reset` did."""

    node: str
    """Name of the Node object, which `reset` leaves in the cluster; empty if the name is unknown."""
    done: tuple[str, ...]
    """The steps, one sentence each."""
    differences: tuple[str, ...]
    """What still differs from the host as it was found."""
    remarks: tuple[str, ...]
    """What is new on the host but may belong to somebody else, and what can no longer be restored."""
    others: tuple[str, ...] = ()
    """Other machines that `up` made. If there are any, the host keeps the settings that `up` gave it."""


def reset(
    machine: str,
    system: System,
    network: NetworkSource,
    remove_files: Callable[[], tuple[str, ...]],
    only_machine: Callable[[], bool],
    progress: Progress,
) -> Ending:
    """Remove the node. If it was the last one, restore the host, and compare the host with how it was found.

    `remove_files` makes a pass as if the machine were not configured, which removes the agent's files for it, and
    returns the failures of the pass. `only_machine`, which is called later, says whether no other machine is configured
    or keeps its settings: another one would need the staged drivers. Raises AgentError, perhaps after some steps.
    """
    done: list[str] = []

    def perform(*steps: plan.NodeStep) -> None:
        done.extend(each.describe() for each in apply(steps, system, progress, performers(network)).done)

    perform(*_candidate_steps(machine, system))
    facts, host, name = plan.observe_node(machine, system), _host(machine, system), machine_unit(machine)
    unit = observe_units([name], system)[name]
    removal = plan.plan_removal(facts, unit.unit_state)
    # Check both plans before anything changes: a damaged record must not stop `reset` halfway.
    plan.plan_restoration(host, NO_LEFTOVERS)
    if not removal and isinstance(facts.record, Absent) and (host.others or isinstance(host.found, Absent)):
        # Nothing is left of the node, and the host stays as it is: it has other nodes, or no record of how it was
        # found.
        return Ending("", (), (), ())
    for step in removal:
        # Nor may a mount: what is mounted is not removed.
        if isinstance(step, plan.RemoveRoot | plan.RemoveTree):
            refuse_mounts(step.path, system)
    perform(*removal)
    if failures := remove_files():
        raise AgentError("; ".join(failures), f"correct this, then run `unbounded-agent reset {machine}` again")
    if system.is_directory(directory := posixpath.dirname(unit_drop_in(machine))):
        perform(plan.RemoveEmptyDirectory(directory))
    if only_machine() and not host.others and isinstance(host.found, AsFound):
        perform(plan.RemoveDriverRoots())
    perform(*plan.plan_restoration(_host(machine, system), _leftovers(network, system)))
    differences, remarks = _compare(machine, network, system)
    if unit.masked:
        remarks += (f"{name} is still masked: `systemctl unmask {name}` lets a machine of this name start again",)
    if not differences:
        perform(*plan.plan_forgetting(machine, host))
    node = facts.record.node if isinstance(facts.record, NodeRecord) else ""
    return Ending(node, tuple(done), differences, remarks, host.others)


def reset_steps(machine: str, system: System, network: NetworkSource) -> tuple[plan.NodeStep, ...]:
    """Return the steps that `reset` would perform, without the removal of the agent's files. Changes nothing.

    Raises AgentError if `reset` must not remove what is there.
    """
    facts, host, unit = plan.observe_node(machine, system), _host(machine, system), machine_unit(machine)
    removal = plan.plan_removal(facts, observe_units([unit], system)[unit].unit_state)
    restoration = plan.plan_restoration(host, _leftovers(network, system))
    return (*_candidate_steps(machine, system), *removal, *restoration, *plan.plan_forgetting(machine, host))


def _candidate_steps(machine: str, system: System) -> tuple[plan.NodeStep, ...]:
    """Return the steps that let the machine's candidate be removed with the other root file systems."""
    candidate = candidate_of(machine)
    if system.link_inode(machine_root(candidate)) is None or is_others_candidate(machine, system):
        return ()
    return plan.StopMachine(candidate), plan.PutAside(machine), plan.ForgetCandidate(machine)


def _host(machine: str, system: System) -> plan.HostFacts:
    """Return the host's facts without its network. The record in `found` has only what can still be restored."""
    found, others = plan.observe_found(system), tuple(name for name in plan.made_nodes(system) if name != machine)
    if not isinstance(found, AsFound):
        return plan.HostFacts(HostState({}, {}, (), {}), {}, Network(), found, others)
    host = restorable(found.host, system)[0]
    # A goal that names everything in the record, so that the current value of each is observed.
    files = tuple(NodeFile(path, b"") for path in host.files)
    goal = HostSettings({each: value or "" for each, value in host.sysctls.items()}, tuple(host.modules), True, files)
    units = {unit: is_enabled(unit, system) for unit in found.units}
    restored = replace(found, host=host, units={} if _starting(machine, system) else found.units)
    return plan.HostFacts(observe_host(goal, system), units, Network(), restored, others)


def _starting(machine: str, system: System) -> tuple[str, ...]:
    """Return the units that start at boot with the target that starts the machine, which so has to stay enabled."""
    return entries_if_present(system, posixpath.dirname(enabling_link(machine_unit(machine))))


def _leftovers(network: NetworkSource, system: System) -> Leftovers:
    found = plan.observe_found(system)
    return leftovers(found.network, observe_network(network, system)) if isinstance(found, AsFound) else NO_LEFTOVERS


def _compare(machine: str, network: NetworkSource, system: System) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return `differences` and `remarks` of Ending.

    Both are empty if the host stays as it is: if it has other nodes, or no record of how it was found.
    """
    host, recorded = _host(machine, system), plan.observe_found(system)
    if host.others or not isinstance(host.found, AsFound) or not isinstance(recorded, AsFound):
        return (), ()
    found, left = host.found, _leftovers(network, system)
    units = [f"{unit} is enabled" for unit, on in host.units.items() if on and found.units.get(unit) is False]
    differences = [*plan.since_found(found.host, host.state), *units]
    differences += [f"{each.describe()} is still there" for each in left.remove]
    kept = [f"{each.describe()} is new; remove it if the node made it" for each in left.keep]
    needed = {unit for unit, on in host.units.items() if on and not recorded.units.get(unit)} - found.units.keys()
    kept += [f"{unit} stays enabled: it starts {', '.join(_starting(machine, system))} at boot" for unit in needed]
    return tuple(differences), (*restorable(recorded.host, system)[1], *kept)
