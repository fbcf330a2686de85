"""Removes a node from the host. If it is the last node, also restores the host as it was before the first node."""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from agent.host.observe.machine import is_enabled, observe_units
from agent.host.provision.apply import Tools, run
from agent.host.provision.host_settings import observe_host, restorable
from agent.host.provision.image import Progress
from agent.host.provision.network import Leftovers, leftovers, observe_network
from agent.host.provision.node_files import NodeRecord
from agent.host.provision.plan import (
    Action,
    HostFacts,
    RemoveDriverRoots,
    RemoveRoot,
    RemoveTree,
    made_nodes,
    observe_found,
    observe_node,
    plan_forgetting,
    plan_removal,
    plan_restoration,
    plan_tidying,
    since_found,
)
from agent.model.errors import AgentError
from agent.model.facts import Absent
from agent.model.node import AsFound, Check, HostSettings, HostState, Network, NodeFile
from agent.model.paths import machine_unit
from agent.system.copy import refuse_mounts
from agent.system.files import System
from agent.system.network import NetworkSource

NO_STATE = HostState({}, {}, (), {})


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


class Reset(Struct, frozen=True):
    """Removes one machine."""

    machine: str
    system: System
    network: NetworkSource
    remove_files: Callable[[], tuple[str, ...]]
    """Makes a pass as if the machine were not configured. Such a pass removes the agent's files for the machine.
    Returns the failures of the pass."""
    only_machine: Callable[[], bool]
    """Returns whether no other machine is configured or keeps its settings. Called after `remove_files`. Another
    machine would need the staged drivers."""
    progress: Progress = lambda _: None

    def run(self) -> Ending:
        """Remove the node. If it was the last one, restore the host, and compare the host with how it was found.

        Raises AgentError, perhaps after some steps.
        """
        facts, host, name = observe_node(self.machine, self.system), self._host(), machine_unit(self.machine)
        unit = observe_units([name], self.system)[name]
        removal, restoration = plan_removal(facts, unit.state), plan_restoration(host, Leftovers((), ()))
        for each in (removal, restoration):
            # Check both plans before anything changes: a damaged record must not stop `reset` halfway.
            if isinstance(each, Check):
                raise AgentError(each.message, each.advice)
        if not removal and isinstance(facts.record, Absent) and (host.others or isinstance(host.found, Absent)):
            # Nothing is left of the node, and the host stays as it is: it has other nodes, or no record of how it was
            # found.
            return Ending("", (), (), ())
        assert not isinstance(removal, Check), "checked above"
        for step in removal:
            # Nor may a mount: what is mounted is not removed.
            if isinstance(step, RemoveRoot | RemoveTree):
                refuse_mounts(step.path, self.system)
        done = self._run(removal)
        if failures := self.remove_files():
            raise AgentError(
                "; ".join(failures), f"correct this, then run `unbounded-agent reset {self.machine}` again"
            )
        done += self._run(plan_tidying(self.machine, self.system.is_directory))
        if self.only_machine() and not host.others and isinstance(host.found, AsFound):
            done += self._run((RemoveDriverRoots(),))
        done += self._run(plan_restoration(self._host(), self._leftovers()))
        differences, remarks = self._compare()
        if unit.masked:
            remarks += (f"{name} is still masked: `systemctl unmask {name}` lets a machine of this name start again",)
        if not differences:
            done += self._run(plan_forgetting(self.machine, host))
        node = facts.record.node if isinstance(facts.record, NodeRecord) else ""
        return Ending(node, done, differences, remarks, host.others)

    def _run(self, steps: tuple[Action, ...] | Check) -> tuple[str, ...]:
        if isinstance(steps, Check):
            raise AgentError(steps.message, steps.advice)
        run(steps, Tools(self.system, self.network), self.progress)
        return tuple(step.describe() for step in steps)

    def _host(self) -> HostFacts:
        """Return the host's facts, with an empty network, because `reset` observes the network in `_leftovers`.

        The record in the field `found` does not contain what can no longer be restored.
        """
        found = observe_found(self.system)
        if isinstance(found, AsFound):
            found = replace(found, host=restorable(found.host, self.system)[0])
        others = tuple(name for name in made_nodes(self.system) if name != self.machine)
        if not isinstance(found, AsFound):
            return HostFacts(NO_STATE, {}, Network(), found, others)
        units = {unit: is_enabled(unit, self.system) for unit in found.units}
        return HostFacts(observe_host(_goal_of(found.host), self.system), units, Network(), found, others)

    def _leftovers(self) -> Leftovers:
        found = observe_found(self.system)
        return (
            leftovers(found.network, observe_network(self.network, self.system))
            if isinstance(found, AsFound)
            else Leftovers((), ())
        )

    def _compare(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return `differences` and `remarks` of Ending.

        Both are empty if the host stays as it is: if it has other nodes, or no record of how it was found.
        """
        host = self._host()
        if host.others or isinstance(host.found, Absent):
            return (), ()
        found, left, recorded = host.found, self._leftovers(), observe_found(self.system)
        assert isinstance(found, AsFound), "`run` has checked the record"
        assert isinstance(recorded, AsFound), "it is the same record"
        units = [f"{unit} is enabled" for unit, on in host.units.items() if on and found.units.get(unit) is False]
        differences = [*since_found(found.host, host.state), *units]
        differences += [f"{each.describe()} is still there" for each in left.remove]
        kept = [f"{each.describe()} is new; remove it if the node made it" for each in left.keep]
        return tuple(differences), (*restorable(recorded.host, self.system)[1], *kept)


def _goal_of(found: HostState) -> HostSettings:
    """Return a goal that names everything in the record, so that `observe_host` returns the current value of each."""
    files = tuple(NodeFile(path, b"") for path in found.files)
    values = {name: value or "" for name, value in found.sysctls.items()}
    return HostSettings(values, tuple(found.modules), swap_off=True, files=files)
