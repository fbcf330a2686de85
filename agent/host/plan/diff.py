"""Compares facts with the goal: returns ordered steps, and the reasons why some are not possible. Pure."""

from collections.abc import Mapping

from msgspec import Struct, field

from agent.host.plan.driver_roots import collect, record_handed, replaceable
from agent.host.plan.goal import Plan, remembered_files
from agent.host.plan.live_devices import Acknowledged, change_running, forbid_withdrawn
from agent.host.state.gpus import GRANTED
from agent.host.state.records import MARK
from agent.model.facts import Absent, Broken, Facts, MachineFacts, Remembered, StagedRoot, Unseen
from agent.model.goal import (
    Action,
    ChangeDevices,
    Fault,
    MachineGoal,
    ProtectDriverRoots,
    PublishDriverRoot,
    ReloadUnits,
    RemoveDriverRoot,
    RemoveFile,
    StageDriverRoot,
    WriteFile,
    fault,
)
from agent.model.paths import (
    STATE,
    UNIT_SETTINGS,
    device_allow_drop_in,
    granted_file,
    machine_files,
    nspawn_file,
    unit_drop_in,
)


class Difference(Struct, frozen=True):
    """The steps (actions) in the order of execution, and the machines whose files must not be written."""

    actions: tuple[Action, ...]
    refused: dict[str, str | Unseen]
    """Why a machine's settings files must not be written, by machine; Unseen if the present files could not be read.

    A machine with a foreign file gets nothing new, and only loses withdrawn devices.
    """
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Unexpected errors by machine. If a machine could not be planned, it stays as it is. If it could not be compared
    with its goal, it gets nothing new and only loses withdrawn devices. If only its report could not be read, it gets
    all its steps."""


def diff(plan: Plan, facts: Facts, acknowledged: Acknowledged = Acknowledged()) -> Difference:
    """Return the steps in order: removals, changes to running machines, settings, driver roots, handoffs, the rest.

    Driver roots come before the handoffs that name them. The rest are steps that no machine waits for, such as removing
    unused driver roots. But if a new root is staged, unused roots are removed first, because it may need their space.

    If systemd must reload its units while a machine does not run, the reload comes right after the settings. If all
    machines run, none of them needs the reload, which blocks PID 1 for longer than all other steps take: it comes after
    the handoffs.
    """
    refused: dict[str, str | Unseen] = {}
    faults = {**plan.faults, **acknowledged.faults}
    running, settings, handoffs = list[ChangeDevices](), list[WriteFile](), list[Action]()
    observed = {machine.name: machine for machine in facts.machines}
    for goal in plan.goal.machines:
        try:
            machine = observed[goal.name]
            why = _refusal(goal, facts)
            if why is None:
                changes = change_running(goal, machine, facts, acknowledged)
                missing_nodes = goal.name in acknowledged.missing_nodes
                handoff = _publish_handoff(goal, machine, facts, changes, missing_nodes=missing_nodes)
                files = (goal.nspawn, goal.drop_in)
                writes = [write for file in files for write in _write_if_different(file, facts)]
                # No error can follow: a machine with a fault must not get part of its steps.
                running += changes
                settings += writes
                handoffs += handoff
            else:
                refused[goal.name] = why
                # After a failed look, the next pass is early enough. The machine may still need the devices until then.
                if not isinstance(why, Unseen):
                    running += forbid_withdrawn(goal, machine, facts)
        except Exception as error:
            faults[goal.name] = fault("compare its settings with the goal", error)
            if goal.name in observed:
                running += forbid_withdrawn(goal, observed[goal.name], facts)
    removals = [*_permission_removals(plan, facts), *_removals(plan, facts)]
    changed_paths = [write.path for write in settings] + [removal.path for removal in removals]
    outdated = any(machine.unit_needs_reload for machine in facts.machines)
    reload_needed = facts.reload_pending or outdated or any(path.startswith(UNIT_SETTINGS) for path in changed_paths)
    reload: list[Action] = [ReloadUnits(outdated)] if reload_needed else []
    all_run = all(each.unit_state == "active" for each in facts.machines)
    reload_early, reload_late = ([], reload) if all_run else (reload, [])
    stage, stage_later = (
        [StageDriverRoot(root, _users(root, plan)) for root in roots if root not in facts.staged]
        for roots in (plan.goal.driver_roots, plan.goal.waiting_roots)
    )
    unused = collect(plan.goal, facts)
    collect_first, collect_last = (unused, []) if stage else ([], unused)
    removed = {action.index for action in unused if isinstance(action, RemoveDriverRoot)}
    hidden = [root for root in facts.staged if root.hidden and root.index not in removed]
    publish, publish_later = (
        [PublishDriverRoot(root, _users(root, plan)) for root in hidden if (root in plan.goal.driver_roots) is used]
        for used in (True, False)
    )
    protect = [ProtectDriverRoots(facts.plain_roots)] if replaceable(facts) else []
    roots = (*collect_first, *protect, *publish, *stage)
    later = (*_record_remembered(plan, facts), *collect_last, *stage_later, *publish_later)
    actions = (*removals, *running, *settings, *reload_early, *roots, *handoffs, *reload_late, *later)
    return Difference(actions, refused, faults)


def settings_pending(goal: MachineGoal, difference: Difference) -> bool:
    """Return whether the machine, if it started now, would start with other settings than those of the goal."""
    paths = (goal.nspawn.path, goal.drop_in.path)
    return any(
        isinstance(action, ReloadUnits) or (isinstance(action, WriteFile) and action.path in paths)
        for action in difference.actions
    )


def changes_left(goal: MachineGoal, difference: Difference) -> bool:
    """Return whether the next pass changes what the running machine has, which its report then does not cover yet."""
    return any(
        (isinstance(action, ChangeDevices) and action.machine == goal.name)
        or (isinstance(action, WriteFile) and action.path == goal.handoff_file.path)
        for action in difference.actions
    )


def startable(machine: MachineFacts, facts: Facts) -> bool:
    """Return whether the agent wrote both of the machine's settings files, and systemd has read the drop-in.

    Without the .nspawn file, the option -U in systemd-nspawn@.service would change the owners of all files in the
    machine. Without the drop-in, nothing would prepare the start. The files may be those of an earlier goal: a node
    with outdated settings is better than no node.
    """
    if facts.reload_pending or machine.unit_needs_reload:
        return False
    files = [facts.files.get(path) for path in (nspawn_file(machine.name), unit_drop_in(machine.name))]
    return all(file and isinstance(file.content, bytes) and file.content.startswith(MARK) for file in files)


def _users(root: StagedRoot, plan: Plan) -> frozenset[str]:
    """Return the machines whose handoffs name a driver root, or will name it."""
    return frozenset(
        goal.name
        for goal in plan.goal.machines
        if any(root in (grant.driver_root, grant.waiting_root) for grant in goal.grants)
    )


def _publish_handoff(
    goal: MachineGoal, machine: MachineFacts, facts: Facts, changes: list[ChangeDevices], *, missing_nodes: bool
) -> list[Action]:
    """Return the steps that publish the handoff, with the agent's records of it.

    The record of the grant is written before the handoff. If the agent crashes between the two writes, the next pass
    sees that the handoff is outdated.

    If the machine reports nodes as missing, the host binds all nodes again. The handoff is then published again even if
    it is unchanged, so that the machine half checks its nodes. That may be left to this pass: the pass that bound the
    nodes ended before it published the handoff; or a pass published the handoff although it could not bind all nodes,
    and a later pass bound the rest. The record of the grant is rewritten too: the time of that file shows when the
    handoff was last published.
    """
    republish = any(change.rebinds for change in changes)
    if missing_nodes and (live := machine.live):
        all_bound = (live.rebound, live.nodes) == (goal.generation, goal.live.nodes)
        republish |= all_bound and machine.live_age < machine.granted_age
    record = WriteFile(granted_file(goal.name), GRANTED.render(goal.granted))
    records = [record] if republish or machine.granted != goal.granted else []
    handoff = [goal.handoff_file] if republish else _write_if_different(goal.handoff_file, facts)
    return [*record_handed(goal, machine), *records, *handoff]


def _record_remembered(plan: Plan, facts: Facts) -> list[WriteFile]:
    """Return the steps that write missing or outdated copies of the record; none if it is empty and no copy exists."""
    files = remembered_files(plan.goal.remembered)
    contents = [facts.files[file.path].content for file in files]
    if plan.goal.remembered == Remembered() and all(isinstance(each, Absent) for each in contents):
        return []
    outdated = [file for file, content in zip(files, contents, strict=True) if content != file.content]
    return outdated


def _write_if_different(file: WriteFile, facts: Facts) -> list[WriteFile]:
    state = facts.files[file.path]
    # Files in the agent's own directory need no ownership record.
    if state.content == file.content and (state.owned or file.path.startswith(f"{STATE}/")):
        return []
    return [file]


def _refusal(goal: MachineGoal, facts: Facts) -> str | Unseen | None:
    """Return why the machine's settings files must not be written; None if they may be."""
    for file, target in (
        (goal.nspawn, f"machines.{goal.name}.nspawn in the configuration"),
        (goal.drop_in, "a drop-in of another name in the same directory, such as 95-local.conf"),
    ):
        state = facts.files[file.path]
        match state.content:
            case Unseen() as unseen:
                return unseen
            case Broken(why):
                return why
            case Absent():
                continue
            # Without the ownership record, the first line still shows that the agent wrote the file.
            case content if not (state.owned or content == file.content or content.startswith(MARK)):
                return f"{file.path} was not written by this agent; move its settings to {target}, and remove the file"
    return None


def _removals(plan: Plan, facts: Facts) -> list[RemoveFile]:
    """Return removals of owned files that no machine needs any longer. Files of held machines stay.

    So do files that could not be read, or are links or directories: somebody else may have put them there. All files of
    a machine stay while it is unknown what `_permission_removals` would remove: without them, later passes would not
    find the machine.
    """
    wanted = {file.path for file in plan.goal.files()}
    wanted |= {path for name in plan.held for path in machine_files(name)}
    for machine in facts.machines:
        drop_in = facts.files.get(device_allow_drop_in(machine.name))
        unread = isinstance(facts.template_device_allow, Unseen) or machine.live_unseen
        if unread or (drop_in and isinstance(drop_in.content, Unseen)):
            wanted.update(machine_files(machine.name))
    return [
        RemoveFile(path)
        for path, state in sorted(facts.files.items())
        # A file that is already missing is included: the pass that removed it may have ended before it could update the
        # ownership record.
        if state.owned and path not in wanted and isinstance(state.content, bytes | Absent)
    ]


def _permission_removals(plan: Plan, facts: Facts) -> list[RemoveFile]:
    """Return removals of the drop-ins in which systemd keeps permissions that machines got while they ran.

    They are removed for machines that are no longer configured. The agent's own drop-in takes precedence over them, but
    only while it exists, and the same pass removes it. Systemd's drop-ins must be removed first, because once the
    agent's settings files are gone, later passes no longer find such a machine.
    """
    template = facts.template_device_allow
    if not isinstance(template, tuple):
        # Without the template unit, it is unknown which entries the agent added. Nor can any machine start.
        return []
    configured = {machine.name for machine in plan.goal.machines} | plan.held.keys() | plan.skipped.keys()
    removals = []
    for machine in facts.machines:
        if machine.name in configured or machine.live is None:
            continue
        agent_lines = {f"DeviceAllow={entry}" for entry in machine.live.allow if entry not in template}
        path = device_allow_drop_in(machine.name)
        content = facts.files[path].content
        # A file without any line of the agent stays, because an administrator has made it.
        if isinstance(content, bytes) and agent_lines & set(content.decode(errors="replace").splitlines()):
            removals.append(RemoveFile(path))
    return removals
