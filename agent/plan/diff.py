"""From what is to what should be: the ordered steps, and what stands in their way. Pure."""

from collections.abc import Set
from dataclasses import dataclass

from agent.actions import Action, ReloadUnits, RemoveFile, StageDriverRoot, WriteFile
from agent.facts import Absent, Broken, Facts, Unseen
from agent.goal import MachineGoal, OwnedFile
from agent.granted import render_granted
from agent.paths import STATE, UNIT_SETTINGS, granted_file, machine_files, set_device_allow
from agent.plan import Plan
from agent.plan.driver_roots import collect, record_handed
from agent.plan.running import change_running


@dataclass(frozen=True, slots=True)
class Said:
    """What is made of the machines' reports."""

    released: Set[str] = frozenset()
    """Machines that do not use any more what was taken back from them."""
    lacking: Set[str] = frozenset()
    """Machines in which nodes of their present handoff are missing."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Steps in the order in which they are to be done, and the files that are not ours to write."""

    actions: tuple[Action, ...]
    refused: dict[str, str]
    """By machine: why its files cannot be written."""


def diff(plan: Plan, facts: Facts, said: Said = Said()) -> Difference:
    """Running machines first, settings (one may be about to start), driver roots, then the handoffs that name them.

    What no machine waits for comes last; but driver roots that nothing uses make place for one that is to be staged.
    """
    refused = {machine.name: why for machine in plan.goal.machines if (why := _refusal(machine, facts)) is not None}
    machines = [machine for machine in plan.goal.machines if machine.name not in refused]
    settings = [
        write for machine in machines for file in (machine.nspawn, machine.drop_in) for write in _write(file, facts)
    ]
    removals = [*_permissions(plan, facts), *_removals(plan, facts)]
    changed = [write.path for write in settings] + [removal.path for removal in removals]
    reload_needed = (
        facts.reload_owed
        or any(path.startswith(UNIT_SETTINGS) for path in changed)
        or any(machine.unit_needs_reload for machine in facts.machines)
    )
    reload: list[Action] = [ReloadUnits()] if reload_needed else []
    stage: list[Action] = [StageDriverRoot(root) for root in plan.goal.driver_roots if root not in facts.staged]
    running = [
        change
        for machine in machines
        for change in change_running(
            machine, facts, released=machine.name in said.released, lacking=machine.name in said.lacking
        )
    ]
    bound = {change.machine for change in running if change.binds_anew}
    bound |= {machine.name for machine in machines if machine.name in said.lacking and _bound_anew(machine, facts)}
    handoffs = [action for machine in machines for action in _publish(machine, facts, again=machine.name in bound)]
    later: list[Action] = [StageDriverRoot(root) for root in plan.goal.waiting_roots if root not in facts.staged]
    unused = collect(plan.goal, facts)
    first, last = (unused, []) if stage else ([], unused)
    at_start, at_end = (reload, []) if any(each.unit_state != "active" for each in facts.machines) else ([], reload)
    if handoffs and not removals:
        # A machine that runs does not need the reload, in which PID 1 answers nobody and which takes longer than all
        # that it waits for: it is owed until the pass in which the machine has answered. One that is about to
        # start does need it; and the unit of a drop-in that was removed may not be looked at any more.
        at_end = []
    changes = (*removals, *running, *settings, *at_start, *first, *stage, *handoffs, *at_end)
    return Difference((*changes, *last, *later), refused)


def settings_pending(goal: MachineGoal, difference: Difference) -> bool:
    """Whether a start of the machine would use other settings than the goal's."""
    paths = (goal.nspawn.path, goal.drop_in.path)
    return any(
        isinstance(action, ReloadUnits) or (isinstance(action, WriteFile) and action.path in paths)
        for action in difference.actions
    )


def _publish(goal: MachineGoal, facts: Facts, *, again: bool) -> list[Action]:
    """The handoff with our notes of it. `again`: also the same one, so that the machine's half looks for its nodes.

    What is granted is noted before it is: a crash in between is found by the handoff that is still the old one. By the
    note's time it is told what was published since, so that it is written even if it says the same.
    """
    machine = next(each for each in facts.machines if each.name == goal.name)
    note = WriteFile(granted_file(goal.name), render_granted(goal.granted))
    noted = [note] if again or machine.granted != goal.granted else []
    handoff = [_whole(goal.handoff_file)] if again else _write(goal.handoff_file, facts)
    return [*record_handed(goal, facts), *noted, *handoff]


def _bound_anew(goal: MachineGoal, facts: Facts) -> bool:
    """Whether all nodes that the machine lacked were bound since it was last told: by a pass that failed or was killed
    before it had told, or after one in which some could not be bound.
    """
    machine = next(each for each in facts.machines if each.name == goal.name)
    whole = machine.live and (machine.live.rebound, machine.live.nodes) == (goal.generation, goal.live.nodes)
    return bool(whole) and machine.live_age < machine.granted_age


def _write(file: OwnedFile, facts: Facts) -> list[WriteFile]:
    state = facts.files[file.path]
    if state.content == file.content and (state.owned or _private(file.path)):
        return []
    return [_whole(file)]


def _whole(file: OwnedFile) -> WriteFile:
    return WriteFile(file.path, file.content, file.mode)


def _refusal(machine: MachineGoal, facts: Facts) -> str | None:
    for file in (machine.nspawn, machine.drop_in):
        state = facts.files[file.path]
        match state.content:
            case Unseen(why) | Broken(why):
                return why
            case Absent():
                continue
            case content if not state.owned and content != file.content:
                return (
                    f"{file.path} was not written by this agent; move its settings to machines.{machine.name}.nspawn "
                    "in the configuration and remove it"
                )
    return None


def _removals(plan: Plan, facts: Facts) -> list[RemoveFile]:
    """Owned files that no machine wants any more; those of a machine that is held stay."""
    wanted = {file.path for file in plan.goal.files()}
    wanted |= {path for name in plan.held for path in machine_files(name)}
    return [
        RemoveFile(path)
        for path, state in sorted(facts.files.items())
        if state.owned and path not in wanted and not isinstance(state.content, Absent)
    ]


def _permissions(plan: Plan, facts: Facts) -> list[RemoveFile]:
    """What was permitted to machines while they ran, and our drop-in does not outrank once it is removed too.

    Before the settings, whose record is what keeps such a machine in mind.
    """
    configured = {machine.name for machine in plan.goal.machines} | plan.held.keys() | plan.skipped.keys()
    removals = []
    for machine in facts.machines:
        if machine.name in configured or machine.live is None:
            continue
        ours = {f"DeviceAllow={entry}" for entry in machine.live.allow if entry not in facts.template_device_allow}
        path = set_device_allow(machine.name)
        content = facts.files[path].content
        # A property that somebody else has set, and none of ours beside it, stays.
        if isinstance(content, bytes) and ours & set(content.decode(errors="replace").splitlines()):
            removals.append(RemoveFile(path))
    return removals


def _private(path: str) -> bool:
    """Whether it lies in a directory that is all ours, where no record of ownership is kept."""
    return path.startswith(f"{STATE}/")
