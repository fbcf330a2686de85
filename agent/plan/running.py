"""What of a machine's devices is to change while it runs. Pure."""

from agent.actions import ChangeDevices
from agent.facts import DeviceNode, Facts, VendorFacts
from agent.goal import MachineGoal
from agent.live import LiveSettings
from agent.plan.drop_in import device_entry


def change_running(goal: MachineGoal, facts: Facts, *, released: bool) -> list[ChangeDevices]:
    """Nothing where nothing is known of it. `released`: it does not use any more what was taken back from it."""
    machine = next(each for each in facts.machines if each.name == goal.name)
    if machine.unit_state != "active" or machine.live is None:
        return []
    allow = (*goal.live.allow, *(entry for entry in _leftover(goal, machine.live, facts) if not released))
    if set(allow) == set(machine.live.allow) and goal.live.nodes == machine.live.nodes:
        return []
    others = tuple(entry for entry in machine.device_allow if entry not in (*machine.live.allow, *allow))
    return [ChangeDevices(goal.name, machine.live, allow, others, goal.live.nodes)]


def _leftover(goal: MachineGoal, live: LiveSettings, facts: Facts) -> list[str]:
    """Permissions for devices that are there and not granted any more: a pod may still be given them by the CDI spec.

    One for a device that is gone goes at once: its number may be another device's soon.
    """
    present = {device_entry(node.number) for each in facts.vendors for node in _nodes(each)}
    wanted = {entry.split()[0] for entry in goal.live.allow}
    return [entry for entry in live.allow if (device := entry.split()[0]) in present and device not in wanted]


def _nodes(vendor: VendorFacts) -> tuple[DeviceNode, ...]:
    return vendor.devices if isinstance(vendor.devices, tuple) else ()
