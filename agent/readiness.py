"""The conditions of one machine, from what both halves see. Pure."""

from collections.abc import Mapping

from agent.conditions import (
    IN_MACHINE,
    NOT_NEEDED_FOR_READY,
    Condition,
    ConditionType,
    Status,
    false,
    not_applicable,
    summarize,
    true,
    unknown,
    worst,
)
from agent.config import MachineSettings
from agent.facts import Absent, Broken, Facts, MachineFacts, StagedRoot, Unseen
from agent.goal import Grant, MachineGoal
from agent.granted import Granted
from agent.handoff import with_remark
from agent.observe.report import Report
from agent.vendors.host import host_vendor

REPORT_INTERVAL = 60.0
"""Seconds between two runs of the machine half by its timer."""
STALE_AFTER = 3 * REPORT_INTERVAL + 30.0
"""Seconds: three reports are missing, and a run may take its time."""

FROM_VENDORS = (
    ConditionType.DRIVER_LOADED,
    ConditionType.DEVICES_PRESENT,
    ConditionType.LIBRARIES_PRESENT,
    ConditionType.FABRIC_READY,
    ConditionType.PERSISTENCE_MODE,
)


def without_gpus(settings: MachineSettings, facts: Facts) -> tuple[Condition, ...]:
    """A machine that gets no GPU, since there is none, or none for it."""
    reason, message = "NoGPU", "this host has no GPU"
    if detached := sorted(gpu.pci_address for vendor in facts.vendors for gpu in vendor.gpus if gpu.detached):
        reason, message = "GPUDetached", f"an administrator detached {', '.join(detached)}, and no other GPU is for it"
    elif drivers := sorted({gpu.driver or "none" for vendor in facts.vendors for gpu in vendor.gpus}):
        reason, message = "NoGPUGranted", f"the GPUs of this host have another driver, or none ({', '.join(drivers)})"
    conditions = [not_applicable(kind, message) for kind in ConditionType if kind is not ConditionType.READY]
    if settings.require_gpus:
        ready = false(ConditionType.READY, reason, f"{message}, and require_gpus is set for this machine")
    else:
        ready = true(ConditionType.READY, reason, f"{message}: nothing is set up")
    return (*conditions, ready)


def held(machine: MachineFacts, why: str) -> tuple[Condition, ...]:
    """A machine that was left as it is: it is not there, or the host could not be observed."""
    if isinstance(machine.root, Absent | Broken):
        ready = false(ConditionType.READY, "NoSuchMachine", why)
        running = false(ConditionType.MACHINE_RUNNING, "NoSuchMachine", why)
        others = [unknown(kind, "NoSuchMachine", why) for kind in ConditionType]
        found = {each.type: each for each in (*others, running, ready)}
        return tuple(found.values())
    conditions = [unknown(kind, "ObservationFailed", why) for kind in ConditionType if kind is not ConditionType.READY]
    return (*conditions, summarize(conditions))


def evaluate(
    settings: MachineSettings,
    goal: MachineGoal,
    facts: Facts,
    report: Report | Absent | Broken | Unseen,
    refused: str,
) -> tuple[Condition, ...]:
    """Every condition in the order of ConditionType, Ready last. `refused`: why the settings cannot be written."""
    machine = next(each for each in facts.machines if each.name == goal.name)
    if not any(grant.gpus or grant.problems for grant in goal.grants):
        return _with_lacking(_without_gpus(settings, machine, goal, facts, report, refused), machine, goal)
    from_vendors = [_merge_vendors(kind, facts, goal.grants) for kind in FROM_VENDORS]
    inside = dict(_inside(machine, goal, report))
    if not settings.node_condition:
        # Not asked of the report: a machine half reports it only where the host half wants it.
        message = f"machines.{goal.name}.node_condition is not set"
        inside[ConditionType.NODE_CONDITION_SET] = not_applicable(ConditionType.NODE_CONDITION_SET, message)
    conditions = [
        *from_vendors,
        _driver_root_staged(goal, facts),
        _machine_running(machine),
        _devices_allowed(machine, goal, refused, inside[ConditionType.DEVICES_ALLOWED]),
        *(inside[kind] for kind in IN_MACHINE),
    ]
    return _with_lacking((*conditions, summarize(conditions)), machine, goal)


def _without_gpus(
    settings: MachineSettings,
    machine: MachineFacts,
    goal: MachineGoal,
    facts: Facts,
    report: Report | Absent | Broken | Unseen,
    refused: str,
) -> tuple[Condition, ...]:
    """With what is to be said of other devices, which Ready, being about GPUs, does not count."""
    conditions = without_gpus(settings, facts)
    inside, said = _inside(machine, goal, report), {}
    if settings.extra_mounts or any(grant.nodes for grant in goal.grants):
        kind = ConditionType.DEVICES_ALLOWED
        said[kind] = _devices_allowed(machine, goal, refused, inside[kind])
    if settings.cdi_modes:
        said[ConditionType.CDI_SPEC_CURRENT] = inside[ConditionType.CDI_SPEC_CURRENT]
    return tuple(said.get(each.type, each) for each in conditions)


def _with_lacking(conditions: tuple[Condition, ...], machine: MachineFacts, goal: MachineGoal) -> tuple[Condition, ...]:
    """What lacks beside GPUs, in DevicesPresent's message: no other change, as pods with GPUs do without."""
    lacking = [*(each for grant in goal.grants for each in grant.lacking), *goal.lacking]
    remark = f"; asked for and not there: {', '.join(lacking)}" if lacking else ""
    if machine.unit_state == "active" and machine.live and machine.live.fixed == goal.live.fixed:
        late = [path for path in goal.live.mounts if path not in machine.live.mounts]
        remark += f"; mounted from the machine's next start on: {', '.join(late)}" if late else ""
    return with_remark(conditions, ConditionType.DEVICES_PRESENT, remark) if remark else conditions


def pending(machine: MachineFacts, goal: MachineGoal, report: Report | Absent | Broken | Unseen) -> bool:
    """Whether the machine has not answered this handoff yet, or not found out everything."""
    if not isinstance(report, Report) or not _answers(report, machine, goal):
        return True
    return any(each.status is Status.UNKNOWN and each.type not in NOT_NEEDED_FOR_READY for each in report.conditions)


def _answers(report: Report, machine: MachineFacts, goal: MachineGoal) -> bool:
    """Whether it is on the present handoff; what says that nodes are missing must be younger than the last binding.

    And than the publication after it. The files' times tell that, as the handoff's generation is the same.
    """
    older = machine.report_age > min(machine.granted_age, machine.live_age)
    return report.generation == goal.generation and not (older and lacks_nodes(goal, report))


def released(machine: MachineFacts, goal: MachineGoal, report: Report | Absent | Broken | Unseen) -> bool:
    """Whether what is not granted any more may be forbidden: its own half took it out of use, or had its time."""
    if isinstance(report, Report) and report.generation == goal.generation:
        return True
    # Nor is a machine waited for that only says that it goes on: what was taken back may be another machine's now.
    asked = isinstance(machine.granted, Granted) and machine.granted == goal.granted
    silent = not isinstance(report, Report | Unseen) or machine.report_age > STALE_AFTER
    return silent or (asked and machine.granted_age > STALE_AFTER)


def lacks_nodes(goal: MachineGoal, report: Report | Absent | Broken | Unseen) -> bool:
    """Whether the machine says of this very handoff that a node is missing, or another one."""
    if not isinstance(report, Report) or report.generation != goal.generation:
        return False
    return any((each.type, each.reason) == (ConditionType.DEVICES_ALLOWED, "WrongNode") for each in report.conditions)


def _merge_vendors(kind: ConditionType, facts: Facts, grants: tuple[Grant, ...]) -> Condition:
    """What the vendors say, of those that have a GPU or a problem here."""
    found = []
    for grant in grants:
        vendor = next(each for each in facts.vendors if each.vendor == grant.vendor)
        if grant.gpus or grant.problems:
            found += [each for each in host_vendor(grant.vendor).conditions(vendor, grant) if each.type is kind]
    return worst(found)


def _driver_root_staged(goal: MachineGoal, facts: Facts) -> Condition:
    kind = ConditionType.DRIVER_ROOT_STAGED
    roots = [grant.driver_root for grant in goal.grants if grant.driver_root]
    waiting = [_waiting(grant.waiting_root, facts) for grant in goal.grants if grant.waiting_root]
    if not any(grant.driver_files and (grant.gpus or grant.problems) for grant in goal.grants):
        return not_applicable(kind, "the granted GPUs need no files of the host's driver")
    if not roots and waiting:
        return false(kind, "NothingFits", f"no driver root fits the loaded kernel module; {'; '.join(waiting)}")
    if not roots:
        return false(kind, "NothingToStage", "the host has no complete driver to stage; see the conditions before")
    for root in roots:
        if root not in facts.staged:
            problems = "".join(f"; {problem}" for problem in facts.staged_problems)
            message = f"driver {root.version} is not staged; `unbounded-agent apply` does it, or says why it cannot"
            return false(kind, "NotStaged", message + problems)
    return true(kind, "Staged", "; ".join([*(_place(root) for root in roots), *waiting]))


def _place(root: StagedRoot) -> str:
    return f"driver {root.version} is driver root {root.index}"


def _waiting(root: StagedRoot, facts: Facts) -> str:
    if root in facts.staged:
        return f"{_place(root)}, and waits until its kernel module is loaded"
    return f"driver {root.version}, which waits until its kernel module is loaded, is not staged yet"


def _machine_running(machine: MachineFacts) -> Condition:
    kind = ConditionType.MACHINE_RUNNING
    match machine.unit_state:
        case "active":
            return true(kind, "Running", f"machine {machine.name} is running")
        case "activating" | "reloading":
            return unknown(kind, "Starting", f"machine {machine.name} is starting")
        case Unseen(why) | Broken(why) | Absent(why):
            return unknown(kind, "ObservationFailed", why)
        case "inactive" if machine.has_run:
            return false(kind, "Stopped", f"it ran and was stopped; start it with `machinectl start {machine.name}`")
        case "inactive":
            return false(kind, "NotStarted", f"machine {machine.name} is not started yet, or waits for its driver")
        case state:
            return false(
                kind,
                "NotRunning",
                f"systemd-nspawn@{machine.name}.service is {state}; see `journalctl -u systemd-nspawn@{machine.name}`",
            )


def _devices_allowed(machine: MachineFacts, goal: MachineGoal, refused: str, inside: Condition) -> Condition:
    kind = ConditionType.DEVICES_ALLOWED
    if refused:
        return false(kind, "ForeignFile", refused)
    if machine.unit_state != "active":
        return inside
    reboot = f"`machinectl reboot {machine.name}`"
    if machine.live is None or machine.live.fixed != goal.live.fixed:
        why = f"machine {machine.name} was started with other settings; when its pods allow it, run {reboot}"
        return false(kind, "MachineRestartNeeded", why)
    lacking = [path for path, number in goal.live.nodes.items() if machine.live.nodes.get(path) != number]
    lacking += [entry for entry in goal.live.allow if entry not in machine.live.allow]
    if lacking:
        why = f"the running machine could not be given {', '.join(lacking)}: it is tried again, or run {reboot}"
        return false(kind, "NotGiven", why)
    return inside


def _inside(
    machine: MachineFacts, goal: MachineGoal, report: Report | Absent | Broken | Unseen
) -> Mapping[ConditionType, Condition]:
    """What the machine half reports, or why that says nothing now."""
    kinds = (ConditionType.DEVICES_ALLOWED, *IN_MACHINE)
    if machine.unit_state != "active":
        return {kind: unknown(kind, "MachineNotRunning", f"machine {machine.name} is not running") for kind in kinds}
    match report:
        case Absent():
            reason, message = (
                "NoReport",
                "the machine has not reported; it may still be booting, or its image lacks this agent's machine half: "
                f"see `journalctl -M {machine.name} -u unbounded-agent-gpu`, and build an image without it from "
                f"containerfiles/",
            )
        case Broken(why):
            reason, message = "BadReport", why
        case Unseen(why):
            reason, message = "ObservationFailed", why
        case _ if not _answers(report, machine, goal):
            reason, message = "HandoffPending", "the machine has not answered the latest handoff yet"
        case _ if machine.report_age > STALE_AFTER:
            reason, message = "ReportStale", f"the machine's last report is {machine.report_age:.0f} s old"
        case _:
            reported = {each.type: each for each in report.conditions}
            missing = "the machine's report does not mention it; its agent may be of another release"
            return {kind: reported.get(kind) or unknown(kind, "NotReported", missing) for kind in kinds}
    return {kind: unknown(kind, reason, message) for kind in kinds}
