"""Finds the machines that have a certain GPU, or may still open it."""

from collections.abc import Iterable

from agent.cli.holders import gpu_nodes
from agent.config.settings import Config
from agent.host.plan.goal import Plan
from agent.host.plan.unit_drop_in import node_by_number
from agent.model.errors import ObservationError
from agent.model.facts import Absent, DeviceNode, Facts, MachineFacts
from agent.model.granted import Granted


def granted_to(address: str, facts: Facts, planned: Plan, config: Config) -> tuple[str, ...]:
    """Return the machines that have the GPU, would have it if it were not detached, or may still open it.

    Raises ObservationError if a machine may run, or start, with the GPU, and its settings cannot be changed now.
    """
    for machine in facts.machines:
        # If a configured machine has ended, its settings can still be changed: they are written before its next start.
        cannot_change = machine.name in planned.held and not (machine.stays_ended and machine.name in config.machines)
        match machine.granted:
            case Absent():
                may_have = False
            case Granted() as granted_now:
                may_have = address in granted_now.gpus
            case _:
                may_have = True
        if cannot_change and may_have:
            raise ObservationError(f"cannot change machine {machine.name}: {planned.held[machine.name]}")
    granted = {
        machine.name
        for machine in planned.goal.machines
        if any(address in (*grant.gpus, *grant.detached) for grant in machine.grants)
    }
    # A machine that may still open the GPU counts too, even if it has been granted another GPU instead.
    devices = device_numbers(gpu_nodes(facts, address))
    goals = {machine.name for machine in planned.goal.machines}
    permitted = {machine.name for machine in facts.machines if machine.name in goals and may_open(machine, devices)}
    return tuple(sorted(granted | permitted))


def device_numbers(nodes: Iterable[DeviceNode]) -> set[str]:
    """Return the nodes' numbers in the form of DeviceAllow= entries."""
    return {node_by_number(node.number) for node in nodes}


def may_open(machine: MachineFacts, devices: set[str]) -> bool:
    """Return whether the machine is known to be permitted to open one of the devices."""
    return machine.live is not None and any(entry.node in devices for entry in machine.live.allow)
