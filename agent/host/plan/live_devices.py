"""Plans changes to a machine's devices while it runs. Pure."""

from collections.abc import Collection

from msgspec.structs import replace

from agent.host.plan.nspawn import node_by_number
from agent.host.state.records import MARK
from agent.model.facts import READ_ONLY, READ_WRITE, DeviceAllow, DeviceNode, Facts, LiveSettings, MachineFacts
from agent.model.goal import ChangeDevices, MachineGoal, gpu_nodes
from agent.model.paths import unit_drop_in


def change_running(
    goal: MachineGoal, facts: Facts, *, released: bool, missing_nodes: bool, forbidden_nodes: bool, now: float
) -> list[ChangeDevices]:
    """Return the change to a running machine; none if nothing differs, or if its live settings are unknown.

    `released`: permissions for withdrawn devices can be removed (agent.host.verify.answers.released), because the
    machine has stopped using the devices, has had enough time to do so, or no longer reports.

    `missing_nodes`: the machine reports nodes of its current handoff as missing. All nodes are then bound again, once
    for each handoff. After a pass with `released` and without missing nodes, they may be bound once more.

    `forbidden_nodes`: the machine reports a node that it may not open. Permissions that the machine's unit has lost are
    then given again. `now` is the time by CLOCK_MONOTONIC.
    """
    machine = next(each for each in facts.machines if each.name == goal.name)
    before = machine.live
    if machine.unit_state != "active" or before is None:
        return []
    still_needed = [] if released else _still_needed(goal, before, facts)
    allow = (*goal.live.allow, *still_needed)
    device_owners = {**goal.live.owners, **{entry.node: before.owners[entry.node] for entry in still_needed}}
    rebind = missing_nodes and before.rebound != goal.generation
    rebound = before.rebound
    if rebind:
        rebound = goal.generation
    elif released and not missing_nodes:
        # From now on, nodes may be bound again for this handoff: they may be missing later, as after a reload of a
        # kernel module. Without `released`, this must wait: the report may still be about an earlier handoff, and then
        # says nothing about these nodes.
        rebound = ""
    kept_since = (before.kept_since or now) if still_needed else 0.0
    in_force = before.allow
    if forbidden_nodes:
        # Somebody may have changed the unit's list, for example with `systemctl set-property`. Of the recorded
        # permissions, only those that are still in the unit's list are in force.
        in_force = tuple(entry for entry in before.allow if entry in machine.device_allow)
    same = set(allow) == set(in_force) and goal.live.nodes == before.nodes
    same = same and (rebound, kept_since) == (before.rebound, before.kept_since)
    if same and device_owners == before.owners and not before.unsure:
        return []
    foreign = _foreign(machine, facts, (*before.allow, *allow))
    after = replace(
        goal.live,
        fixed=before.fixed,
        allow=allow,
        rebound=rebound,
        owners=device_owners,
        mounts=before.mounts,
        kept_since=kept_since,
    )
    base = replace(before, allow=in_force)
    if rebind:
        # Act as if the machine had no nodes, so that all are bound. Permissions may be missing too: if a GPU left the
        # bus while the machine started, the record may have that GPU, although the machine has started with settings
        # that neither bind nor permit it. If the unit lacks a recorded permission, `unsure` lets the step set them all.
        unsure = before.unsure or not set(before.allow) <= set(machine.device_allow)
        base = replace(before, nodes={}, unsure=unsure)
    return [ChangeDevices(goal.name, base, after, foreign, gpu_nodes(goal.grants))]


def withdrawn_nodes(name: str, facts: Facts, granted: Collection[str]) -> tuple[str, ...]:
    """Return the nodes that a machine that may run still has, or may have, although they are no longer granted."""
    machine = next((each for each in facts.machines if each.name == name), None)
    live = machine.live if machine and machine.may_run else None
    if live is None:
        return ()
    nodes = (path for path, value in live.nodes.items() if not value.startswith((READ_ONLY, READ_WRITE)))
    return tuple(sorted({*live.withdrawn, *nodes}.difference(granted)))


def forbid_withdrawn(goal: MachineGoal, facts: Facts) -> list[ChangeDevices]:
    """Return a change that only forbids the devices that are no longer granted.

    It is for machines that get no other steps: those with a fault, and those whose settings must not be written.
    """
    wanted = {entry.node for entry in goal.live.allow}
    changes = []
    for machine in facts.machines:
        if machine.name == goal.name and machine.unit_state == "active" and (before := machine.live):
            allow = tuple(entry for entry in before.allow if entry.node in wanted)
            foreign = _foreign(machine, facts, before.allow)
            if allow != before.allow:
                after = replace(before, allow=allow, kept_since=0.0)
                changes.append(ChangeDevices(goal.name, before, after, foreign))
    return changes


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


def _still_needed(goal: MachineGoal, live: LiveSettings, facts: Facts) -> list[DeviceAllow]:
    """Return the permissions to keep for withdrawn devices, which the machine's CDI specification may still contain.

    A permission is kept only if a device with its number exists, and the number still belongs to the same GPU or shared
    node as when the permission was given. Otherwise a different device may have the number, now or later, as when a
    driver finds GPUs in another order.
    """
    present, granted = _owners(facts), {entry.node for entry in goal.live.allow}
    withdrawn = [entry for entry in live.allow if entry.node in present and entry.node not in granted]
    return [entry for entry in withdrawn if live.owners.get(entry.node) == present[entry.node]]


def owners(allow: Collection[DeviceAllow], facts: Facts) -> dict[str, str]:
    """Return the current owner of each entry's device number, in the form of LiveSettings.owners."""
    present = _owners(facts)
    return {entry.node: present[entry.node] for entry in allow if entry.node in present}


def permissions_to_keep(name: str, facts: Facts, allow: Collection[DeviceAllow]) -> tuple[DeviceAllow, ...]:
    """Return the permissions that the machine has in addition to `allow`, and that its processes may still need.

    They are for GPUs that are being drained, or for devices that systemd's template allows but the agent no longer
    grants. Both kinds are kept in the machine's settings: otherwise a daemon-reload, or the next change of a property,
    could withdraw them.
    """
    live = next((each.live for each in facts.machines if each.name == name), None)
    if live is None:
        return ()
    draining = {node_by_number(node.number): _owner(node) for node in _draining(facts)}
    may_need = draining.keys() - {entry.node for entry in allow}
    # Keep a permission if its device number still belongs to the same GPU or shared node as when it was permitted, or
    # if no owner is known, as after the record was lost.
    same = {device for device in may_need if live.owners.get(device, draining[device]) == draining[device]}
    template = facts.template_device_allow
    no_longer_granted = set(template).difference(allow) if isinstance(template, tuple) else set()
    return tuple(entry for entry in live.allow if entry in no_longer_granted or entry.node in same)


def _draining(facts: Facts) -> list[DeviceNode]:
    """Return the nodes that users of draining GPUs may still open, including nodes that GPUs share."""
    gpu_vendors = replace(facts, vendors=tuple(vendor for vendor in facts.vendors if vendor.gpus))
    return [node for node in _all_nodes(gpu_vendors) if facts.draining and node.pci_address in ("", *facts.draining)]


def _owners(facts: Facts) -> dict[str, str]:
    """Return the owner of every device on the host, by the name of the device in a DeviceAllow= entry."""
    return {node_by_number(node.number): _owner(node) for node in _all_nodes(facts)}


def _owner(node: DeviceNode) -> str:
    return node.pci_address or node.path


def _all_nodes(facts: Facts) -> list[DeviceNode]:
    return [node for vendor in facts.vendors if isinstance(vendor.devices, tuple) for node in vendor.devices]
