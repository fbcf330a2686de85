"""What of a machine's devices is to change while it runs. Pure."""

from collections.abc import Collection
from dataclasses import replace

from agent.actions import ChangeDevices
from agent.facts import DeviceNode, Facts
from agent.goal import MachineGoal
from agent.live import LiveSettings
from agent.plan.drop_in import device_entry


def change_running(goal: MachineGoal, facts: Facts, *, released: bool, lacking: bool) -> list[ChangeDevices]:
    """Nothing where nothing is known of it. `released`: it does not use any more what was taken back from it.

    `lacking`: it says of its present handoff that nodes are missing. They are bound once more, not at every look.
    """
    machine = next(each for each in facts.machines if each.name == goal.name)
    before = machine.live
    if machine.unit_state != "active" or before is None:
        return []
    leftover = [] if released else _leftover(goal, before, facts)
    allow = (*goal.live.allow, *leftover)
    noted = {**goal.live.owners, **{device: before.owners[device] for device in map(_device, leftover)}}
    rebind = lacking and before.rebound != goal.generation
    # Until it has all of them again: a module that is loaded twice makes its nodes anew twice.
    rebound = goal.generation if rebind else "" if released and not lacking else before.rebound
    same = set(allow) == set(before.allow) and goal.live.nodes == before.nodes and rebound == before.rebound
    if same and noted == before.owners and not before.unsure:
        return []
    others = tuple(entry for entry in machine.device_allow if entry not in (*before.allow, *allow))
    after = LiveSettings(before.fixed, allow, goal.live.nodes, rebound, owners=noted, mounts=before.mounts)
    return [ChangeDevices(goal.name, replace(before, nodes={}) if rebind else before, after, others)]


def _leftover(goal: MachineGoal, live: LiveSettings, facts: Facts) -> list[str]:
    """Permissions for devices that are there and not granted any more: a pod may still be given them by the CDI spec.

    One for a device that is gone goes at once: its number may be another device's soon. So does one whose number is
    another device's already, as after a driver found its GPUs in another order, or of which that cannot be told.
    """
    present, wanted = _owners(facts), set(map(_device, goal.live.allow))
    known = [entry for entry in live.allow if (device := _device(entry)) in present and device not in wanted]
    return [entry for entry in known if live.owners.get(_device(entry)) == present[_device(entry)]]


def owners(allow: Collection[str], facts: Facts) -> dict[str, str]:
    """What has each number of these entries now, as LiveSettings notes it."""
    present = _owners(facts)
    return {device: present[device] for device in map(_device, allow) if device in present}


def still_used(name: str, facts: Facts, allow: Collection[str]) -> tuple[str, ...]:
    """Permissions, beside `allow`, that the machine has and the last users of its GPUs that are drained may need.

    A part of its settings: else the next daemon-reload, whose ever, would take them away.
    """
    live = next((each.live for each in facts.machines if each.name == name), None)
    if live is None:
        return ()
    draining = {device_entry(node.number): _owner(node) for node in _draining(facts)}
    may_need = draining.keys() - set(map(_device, allow))
    # By the same GPU, or by an older version, which did not note whose the numbers were.
    same = {device for device in may_need if live.owners.get(device, draining[device]) == draining[device]}
    return tuple(entry for entry in live.allow if _device(entry) in same)


def _draining(facts: Facts) -> list[DeviceNode]:
    """What the last users of GPUs may go on to open: with those, the nodes that belong to no GPU alone."""
    of_gpus = replace(facts, vendors=tuple(vendor for vendor in facts.vendors if vendor.gpus))
    return [node for node in _all_nodes(of_gpus) if facts.draining and node.pci_address in ("", *facts.draining)]


def _owners(facts: Facts) -> dict[str, str]:
    return {device_entry(node.number): _owner(node) for node in _all_nodes(facts)}


def _owner(node: DeviceNode) -> str:
    return node.pci_address or node.path


def _device(entry: str) -> str:
    return entry.split()[0]


def _all_nodes(facts: Facts) -> list[DeviceNode]:
    return [node for vendor in facts.vendors if isinstance(vendor.devices, tuple) for node in vendor.devices]
