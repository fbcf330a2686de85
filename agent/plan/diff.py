"""From what is to what should be: the ordered steps, and what stands in their way. Pure."""

from collections.abc import Set
from dataclasses import dataclass

from agent.actions import Action, ChangeDevices, ReloadUnits, RemoveFile, StageDriverRoot, WriteFile
from agent.facts import Absent, Broken, DeviceNode, Facts, Unseen, VendorFacts
from agent.goal import MachineGoal, OwnedFile
from agent.live import LiveSettings
from agent.paths import STATE, UNITS, machine_files
from agent.plan import Plan
from agent.plan.drop_in import device_entry


@dataclass(frozen=True, slots=True)
class Difference:
    """Steps in the order in which they are to be done, and the files that are not ours to write."""

    actions: tuple[Action, ...]
    refused: dict[str, str]
    """By machine: why its files cannot be written."""


def diff(plan: Plan, facts: Facts, released: Set[str] = frozenset()) -> Difference:
    """Settings first (a machine may be about to start), then driver roots, then the handoffs that name them.

    The reload last: it takes longer than all else, and only the next start of a machine needs it.

    `released`: the machines that do not use any more what was taken back from them.
    """
    refused = {machine.name: why for machine in plan.goal.machines if (why := _refusal(machine, facts)) is not None}
    machines = [machine for machine in plan.goal.machines if machine.name not in refused]
    settings = [
        write for machine in machines for file in (machine.nspawn, machine.drop_in) for write in _write(file, facts)
    ]
    removals = _removals(plan, facts)
    changed = [write.path for write in settings] + [removal.path for removal in removals]
    reload_needed = any(path.startswith(f"{UNITS}/") for path in changed) or any(
        machine.unit_needs_reload for machine in facts.machines
    )
    reload: list[Action] = [ReloadUnits()] if reload_needed else []
    stage: list[Action] = [StageDriverRoot(root) for root in plan.goal.driver_roots if root not in facts.staged]
    handoffs = [write for machine in machines for write in _write(machine.handoff_file, facts)]
    running = [change for machine in machines for change in _in_running(machine, facts, machine.name in released)]
    return Difference((*removals, *settings, *running, *stage, *handoffs, *reload), refused)


def _in_running(goal: MachineGoal, facts: Facts, released: bool) -> list[ChangeDevices]:
    """Before the handoff, whose reader opens the nodes."""
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


def _write(file: OwnedFile, facts: Facts) -> list[WriteFile]:
    state = facts.files[file.path]
    if state.content == file.content and (state.owned or _private(file.path)):
        return []
    return [WriteFile(file.path, file.content, file.mode)]


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


def _private(path: str) -> bool:
    """Whether it lies in a directory that is all ours, where no record of ownership is kept."""
    return path.startswith(f"{STATE}/")
