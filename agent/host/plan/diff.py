"""Compares facts with the goal: returns ordered steps, and the reasons why some are not possible. Pure."""

from collections.abc import Mapping, Set

from msgspec import Struct, field

from agent.host.plan.driver_roots import collect, protect, publish, record_handed
from agent.host.plan.goal import Plan, record_remembered
from agent.host.plan.live_devices import change_running, forbid_withdrawn
from agent.host.state.gpus import GRANTED
from agent.host.state.records import MARK
from agent.model.facts import Absent, Broken, Facts, MachineFacts, Unseen
from agent.model.goal import (
    Action,
    ChangeDevices,
    Fault,
    MachineGoal,
    OwnedFile,
    ReloadUnits,
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


class Acknowledged(Struct, frozen=True):
    """What follows from the machines' reports, or from the lack of a current report."""

    released: Set[str] = frozenset()
    """Machines from which permissions for withdrawn devices can be removed now."""
    missing_nodes: Set[str] = frozenset()
    """Machines that report nodes of their current handoff as missing."""
    forbidden_nodes: Set[str] = frozenset()
    """Machines that report that they may not open a node of their current handoff."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Unexpected errors while reading reports, by machine."""
    at: float = 0.0
    """When the reports were read, in seconds of CLOCK_MONOTONIC."""


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


class _Steps(Struct, frozen=True):
    """The steps for one machine."""

    running: list[ChangeDevices]
    """Changes to the running machine."""
    settings: list[WriteFile]
    """Settings for the machine's next start."""
    handoff: list[Action]
    """The handoff, and records of it."""


def diff(plan: Plan, facts: Facts, acknowledged: Acknowledged = Acknowledged()) -> Difference:
    """Return the steps in order: removals, changes to running machines, settings, driver roots, handoffs, the rest.

    Driver roots come before the handoffs that name them. The rest are steps that no machine waits for, such as removing
    unused driver roots. But if a new root is staged, unused roots are removed first, because it may need their space.

    If systemd must reload its units while a machine does not run, the reload comes right after the settings. If all
    machines run, the reload comes after the handoffs, or in a later pass.
    """
    refused: dict[str, str | Unseen] = {}
    faults, machines = {**plan.faults, **acknowledged.faults}, []
    for machine in plan.goal.machines:
        try:
            why = _refusal(machine, facts)
            if why is None:
                machines.append(_steps(machine, facts, acknowledged))
            else:
                refused[machine.name] = why
                # After a failed look, the next pass is early enough. The machine may still need the devices until then.
                if not isinstance(why, Unseen):
                    machines.append(_Steps(forbid_withdrawn(machine, facts), [], []))
        except Exception as error:
            faults[machine.name] = fault("compare its settings with the goal", error)
            machines.append(_Steps(forbid_withdrawn(machine, facts), [], []))
    settings = [write for machine in machines for write in machine.settings]
    removals = [*_permission_removals(plan, facts), *_removals(plan, facts)]
    changed_paths = [write.path for write in settings] + [removal.path for removal in removals]
    reload_needed = (
        facts.reload_pending
        or any(path.startswith(UNIT_SETTINGS) for path in changed_paths)
        or any(machine.unit_needs_reload for machine in facts.machines)
    )
    reload: list[Action] = [ReloadUnits()] if reload_needed else []
    stage: list[Action] = [StageDriverRoot(root) for root in plan.goal.driver_roots if root not in facts.staged]
    running = [change for machine in machines for change in machine.running]
    handoffs = [action for machine in machines for action in machine.handoff]
    later: list[Action] = [StageDriverRoot(root) for root in plan.goal.waiting_roots if root not in facts.staged]
    later += [WriteFile(path, content) for path, content in facts.time_records.items()]
    unused = collect(plan.goal, facts)
    collect_first, collect_last = (unused, []) if stage else ([], unused)
    publish_now, publish_later = publish(plan.goal, facts, unused)
    later += publish_later
    roots = [*collect_first, *protect(facts), *publish_now, *stage]
    all_run = all(each.unit_state == "active" for each in facts.machines)
    reload_early, reload_late = ([], reload) if all_run else (reload, [])
    if handoffs and not removals:
        # If all machines run, none of them needs the reload, which blocks PID 1 for longer than all other steps take:
        # leave it to the pass that follows their reports. If a machine does not run, `reload_early` has the reload.
        # After removals, the reload must not wait: later passes may not observe a unit whose drop-in was removed.
        reload_late = []
    records = record_remembered(plan.goal.remembered, facts)
    changes = (*removals, *running, *settings, *reload_early, *roots, *handoffs, *reload_late, *records)
    return Difference((*changes, *collect_last, *later), refused, faults)


def _steps(machine: MachineGoal, facts: Facts, acknowledged: Acknowledged) -> _Steps:
    missing_nodes = machine.name in acknowledged.missing_nodes
    released = machine.name in acknowledged.released
    running = change_running(
        machine,
        facts,
        released=released,
        missing_nodes=missing_nodes,
        forbidden_nodes=machine.name in acknowledged.forbidden_nodes,
        now=acknowledged.at,
    )
    republish = any(change.rebinds for change in running) or (missing_nodes and _was_rebound(machine, facts))
    settings = [write for file in (machine.nspawn, machine.drop_in) for write in _write_if_different(file, facts)]
    return _Steps(running, settings, _publish_handoff(machine, facts, republish=republish))


def settings_pending(goal: MachineGoal, difference: Difference) -> bool:
    """Return whether the machine, if it started now, would start with other settings than those of the goal."""
    paths = (goal.nspawn.path, goal.drop_in.path)
    return any(
        isinstance(action, ReloadUnits) or (isinstance(action, WriteFile) and action.path in paths)
        for action in difference.actions
    )


def changes_left(goal: MachineGoal, difference: Difference) -> bool:
    """Return whether the next pass changes the running machine's devices or publishes its handoff.

    If so, the machine's present report does not cover these changes yet.
    """
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
    files = [facts.files.get(path) for path in (nspawn_file(machine.name), unit_drop_in(machine.name))]
    contents = [file.content for file in files if file]
    unread = facts.reload_pending or machine.unit_needs_reload
    return (
        not unread
        and len(contents) == len(files)
        and all(isinstance(each, bytes) and each.startswith(MARK) for each in contents)
    )


def _publish_handoff(goal: MachineGoal, facts: Facts, *, republish: bool) -> list[Action]:
    """Return the steps that publish the handoff, with the agent's records of it.

    The record of the grant is written before the handoff. If the agent crashes between the two writes, the next pass
    sees that the handoff is outdated. With `republish`, the handoff is published again even if it is unchanged, so that
    the machine half checks its nodes. The record of the grant is then rewritten too: the time of that file shows when
    the handoff was last published.
    """
    machine = next(each for each in facts.machines if each.name == goal.name)
    record = WriteFile(granted_file(goal.name), GRANTED.render(goal.granted))
    records = [record] if republish or machine.granted != goal.granted else []
    handoff = [_write(goal.handoff_file)] if republish else _write_if_different(goal.handoff_file, facts)
    return [*record_handed(goal, facts), *records, *handoff]


def _was_rebound(goal: MachineGoal, facts: Facts) -> bool:
    """Return whether the host has bound all nodes of the goal again since it last published the handoff.

    The host binds all nodes again if the machine reports some of them missing. After that, it must publish the handoff
    again, so that the machine half checks the nodes. That is left to this pass in two cases: the pass that bound the
    nodes ended before it published the handoff; or a pass published the handoff although it could not bind all nodes,
    and a later pass bound the rest.
    """
    machine = next(each for each in facts.machines if each.name == goal.name)
    all_bound = machine.live and (machine.live.rebound, machine.live.nodes) == (goal.generation, goal.live.nodes)
    return bool(all_bound) and machine.live_age < machine.granted_age


def _write_if_different(file: OwnedFile, facts: Facts) -> list[WriteFile]:
    state = facts.files[file.path]
    if state.content == file.content and (state.owned or _in_state_directory(file.path)):
        return []
    return [_write(file)]


def _write(file: OwnedFile) -> WriteFile:
    return WriteFile(file.path, file.content, file.mode)


def _refusal(machine: MachineGoal, facts: Facts) -> str | Unseen | None:
    """Return why the machine's settings files must not be written; None if they may be.

    Without the ownership record, the first line of a file still shows that the agent wrote it.
    """
    for file in (machine.nspawn, machine.drop_in):
        state = facts.files[file.path]
        match state.content:
            case Unseen() as unseen:
                return unseen
            case Broken(why):
                return why
            case Absent():
                continue
            case content if not (state.owned or content == file.content or content.startswith(MARK)):
                target = (
                    f"machines.{machine.name}.nspawn in the configuration"
                    if file is machine.nspawn
                    else "a drop-in of another name in the same directory, such as 95-local.conf"
                )
                return f"{file.path} was not written by this agent; move its settings to {target}, and remove the file"
    return None


def _removals(plan: Plan, facts: Facts) -> list[RemoveFile]:
    """Return removals of owned files that no machine needs any longer. Files of held machines stay."""
    wanted = {file.path for file in plan.goal.files()}
    wanted |= {path for name in plan.held for path in machine_files(name)}
    return [
        RemoveFile(path)
        for path, state in sorted(facts.files.items())
        # A file that is already missing is included: the pass that removed it may have ended before it could update the
        # ownership record.
        if state.owned and path not in wanted
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


def _in_state_directory(path: str) -> bool:
    """Return whether the path is in the agent's own directory, where files need no ownership record."""
    return path.startswith(f"{STATE}/")
