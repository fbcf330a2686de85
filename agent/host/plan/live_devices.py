"""Plans changes to a machine's devices while it runs. Pure."""

from collections.abc import Collection, Mapping, Set

from msgspec import Struct, field
from msgspec.structs import replace

from agent.host.plan.nspawn import node_by_number
from agent.host.state.records import MARK
from agent.model.facts import READ_ONLY, READ_WRITE, DeviceAllow, Facts, MachineFacts
from agent.model.goal import ChangeDevices, Fault, MachineGoal, gpu_nodes
from agent.model.paths import unit_drop_in


class Acknowledged(Struct, frozen=True):
    """What follows from the machines' reports, or from the lack of a current report."""

    released: Set[str] = frozenset()
    """Machines that have stopped using their withdrawn devices, have had enough time to do so, or no longer report
    (agent.host.verify.answers.released): the permissions for these devices can be removed."""
    missing_nodes: Set[str] = frozenset()
    """Machines that report nodes of their current handoff as missing."""
    forbidden_nodes: Set[str] = frozenset()
    """Machines that report that they may not open a node of their current handoff."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Unexpected errors while reading reports, by machine."""
    at: float = 0.0
    """When the reports were read, in seconds of CLOCK_MONOTONIC."""


def change_running(
    goal: MachineGoal, machine: MachineFacts, facts: Facts, acknowledged: Acknowledged
) -> list[ChangeDevices]:
    """Return the change to a running machine; none if nothing differs, or if its live settings are unknown."""
    before = machine.live
    if machine.unit_state != "active" or before is None:
        return []
    released, missing_nodes = goal.name in acknowledged.released, goal.name in acknowledged.missing_nodes
    # The machine's CDI specification may still contain withdrawn devices. Their permissions are kept while a device has
    # their number, and belongs to the same GPU or shared node as when the permission was given. Otherwise a different
    # device may have the number, now or later, as when a driver finds GPUs in another order.
    present, granted = owners(facts), {entry.node for entry in goal.live.allow}
    withdrawn = [entry for entry in before.allow if entry.node in present and entry.node not in granted]
    same_owner = [entry for entry in withdrawn if before.owners.get(entry.node) == present[entry.node]]
    still_needed = [] if released else same_owner
    rebind, rebound = missing_nodes and before.rebound != goal.generation, before.rebound
    if rebind:
        rebound = goal.generation
    elif released and not missing_nodes:
        # From now on, nodes may be bound again for this handoff: they may be missing later, as after a reload of a
        # kernel module. Without `released`, this must wait: the report may still be about an earlier handoff, and then
        # says nothing about these nodes.
        rebound = ""
    after = replace(
        goal.live,
        fixed=before.fixed,
        allow=(*goal.live.allow, *still_needed),
        rebound=rebound,
        owners={**goal.live.owners, **{entry.node: before.owners[entry.node] for entry in still_needed}},
        mounts=before.mounts,
        kept_since=(before.kept_since or acknowledged.at) if still_needed else 0.0,
    )
    base = before
    if goal.name in acknowledged.forbidden_nodes:
        # Somebody may have changed the unit's list, for example with `systemctl set-property`. Of the recorded
        # permissions, only those that are still in the unit's list are in force.
        base = replace(before, allow=tuple(entry for entry in before.allow if entry in machine.device_allow))
    new, old = ((set(each.allow), each.nodes, each.rebound, each.kept_since, each.owners) for each in (after, base))
    if new == old and not before.unsure:
        return []
    if rebind:
        # Act as if the machine had no nodes, so that all are bound. Permissions may be missing too: if a GPU left the
        # bus while the machine started, the record may have that GPU, although the machine has started with settings
        # that neither bind nor permit it. If the unit lacks a recorded permission, `unsure` lets the step set them all.
        base = replace(before, nodes={}, unsure=before.unsure or not set(before.allow) <= set(machine.device_allow))
    foreign = _foreign(machine, facts, (*before.allow, *after.allow))
    return [ChangeDevices(goal.name, base, after, foreign, gpu_nodes(goal.grants))]


def forbid_withdrawn(goal: MachineGoal, machine: MachineFacts, facts: Facts) -> list[ChangeDevices]:
    """Return a change that only forbids the devices that are no longer granted.

    It is for machines that get no other steps: those with a fault, and those whose settings must not be written.
    """
    before = machine.live
    if machine.unit_state != "active" or before is None:
        return []
    wanted = {entry.node for entry in goal.live.allow}
    allow = tuple(entry for entry in before.allow if entry.node in wanted)
    after = replace(before, allow=allow, kept_since=0.0)
    change = ChangeDevices(goal.name, before, after, _foreign(machine, facts, before.allow))
    return [] if allow == before.allow else [change]


def _foreign(machine: MachineFacts, facts: Facts, known: Collection[DeviceAllow]) -> tuple[DeviceAllow, ...]:
    """Return the entries of the unit's list that the agent did not add. `known` are entries that it added.

    The entries of the agent's own drop-in count as added by the agent, too. If the drop-in could not be updated, it
    still has withdrawn devices, and after a daemon-reload PID 1 lists them again.
    """
    drop_in = facts.files.get(unit_drop_in(machine.name))
    content = drop_in.content if drop_in else b""
    lines = content.splitlines() if isinstance(content, bytes) and content.startswith(MARK) else []
    return tuple(
        each for each in machine.device_allow if each not in known and f"DeviceAllow={each}".encode() not in lines
    )


def withdrawn_nodes(machine: MachineFacts, granted: Collection[str]) -> tuple[str, ...]:
    """Return the nodes that a machine that may run still has, or may have, although they are no longer granted."""
    if machine.live is None or not machine.may_run:
        return ()
    nodes = (path for path, value in machine.live.nodes.items() if not value.startswith((READ_ONLY, READ_WRITE)))
    return tuple(sorted({*machine.live.withdrawn, *nodes}.difference(granted)))


def permissions_to_keep(machine: MachineFacts, facts: Facts, allow: Collection[DeviceAllow]) -> tuple[DeviceAllow, ...]:
    """Return the permissions for GPUs that are being drained, which the machine has in addition to `allow`.

    Its processes may still need them, so they are kept in the machine's settings: otherwise a daemon-reload, or the
    next change of a property, could withdraw them.
    """
    if machine.live is None:
        return ()
    # Users of draining GPUs may still open the nodes that GPUs share, too.
    with_gpus = replace(facts, vendors=tuple(vendor for vendor in facts.vendors if vendor.gpus))
    draining = owners(with_gpus, ("", *facts.draining) if facts.draining else ())
    may_need = draining.keys() - {entry.node for entry in allow}
    # Keep a permission if its device number still belongs to the same GPU or shared node as when it was permitted, or
    # if no owner is known, as after the record was lost.
    same = {device for device in may_need if machine.live.owners.get(device, draining[device]) == draining[device]}
    return tuple(entry for entry in machine.live.allow if entry.node in same)


def owners(facts: Facts, gpus: Collection[str] | None = None) -> dict[str, str]:
    """Return the owner of each device on the host, by the device's name in a DeviceAllow= entry.

    An owner is a GPU's PCI address, or the path of a shared node (LiveSettings.owners). With `gpus`, leave out the
    devices of all other GPUs.
    """
    nodes = (node for vendor in facts.vendors if isinstance(vendor.devices, tuple) for node in vendor.devices)
    return {
        node_by_number(node.number): node.pci_address or node.path
        for node in nodes
        if gpus is None or node.pci_address in gpus
    }
