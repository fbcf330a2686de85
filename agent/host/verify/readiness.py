"""Evaluates the conditions of one machine, from what both halves observe. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import starmap

from agent.config.settings import MachineSettings
from agent.host.observe.machine import Report
from agent.host.vendors import host_vendor
from agent.host.verify.answers import MACHINE_SAYS, STALE_AFTER, answers, refusal, why_unanswered
from agent.model.conditions import (
    IN_MACHINE,
    Condition,
    ConditionType,
    Reason,
    Status,
    false,
    not_applicable,
    summarize,
    true,
    unknown,
    worst,
)
from agent.model.facts import Absent, Broken, Facts, MachineFacts, Remembered, RememberedGpu, Seen, StagedRoot, Unseen
from agent.model.goal import Grant, MachineGoal
from agent.model.handoff import FabricAnswer, with_remark
from agent.model.paths import driver_root, machine_unit, mount_unit
from agent.model.text import first_of, restart_command, rfc3339
from agent.vendors.host_vendor import FabricReport

PLAIN_ADVICE = (
    "if the kernel has overlay file systems, stop all machines and run `unbounded-agent apply`: docs/drivers.md"
)

FROM_VENDORS = (
    ConditionType.DRIVER_LOADED,
    ConditionType.DEVICES_PRESENT,
    ConditionType.LIBRARIES_PRESENT,
    ConditionType.FABRIC_READY,
    ConditionType.PERSISTENCE_MODE,
)
IF_CONFIGURED = {
    ConditionType.VALIDATION_MARKERS_SET: "validation_markers",
    ConditionType.NODE_CONDITION_SET: "node_condition",
}
"""Conditions that the machine half reports only if a key of the machine's settings is set, each with that key."""


def held(machine: MachineFacts, why: str) -> tuple[Condition, ...]:
    """Return the conditions of a machine in `Plan.held`.

    `why` is the reason there: the machine is missing, or a fact that its plan needs could not be observed.
    """
    if isinstance(machine.root, Absent | Broken):
        ready = false(ConditionType.READY, Reason.NO_SUCH_MACHINE, why)
        running = false(ConditionType.MACHINE_RUNNING, Reason.NO_SUCH_MACHINE, why)
        defaults = [unknown(kind, Reason.NO_SUCH_MACHINE, why) for kind in ConditionType]
        by_type = {each.type: each for each in (*defaults, running, ready)}
        return tuple(by_type.values())
    conditions = [
        unknown(kind, Reason.OBSERVATION_FAILED, why) for kind in ConditionType if kind is not ConditionType.READY
    ]
    return (*conditions, summarize(conditions))


def faulted(why: str) -> tuple[Condition, ...]:
    """Return the conditions of a machine with an unexpected error."""
    return tuple(unknown(kind, Reason.INTERNAL_ERROR, why) for kind in ConditionType)


def evaluate(
    settings: MachineSettings,
    goal: MachineGoal,
    facts: Facts,
    report: Report | Absent | Broken | Unseen,
    refused: str | Unseen,
    previous: Iterable[Condition] = (),
) -> tuple[Condition, ...]:
    """Return the conditions in the order of ConditionType, Ready last.

    In the result, GPUsComplete is missing or a placeholder: `with_lost_gpus` evaluates it. `refused` says why the
    machine's settings files must not be written: empty if they may be, Unseen if the present files could not be read.
    `previous` are the conditions of the previous pass.
    """
    machine = next(each for each in facts.machines if each.name == goal.name)
    if not any(grant.gpus or grant.problems for grant in goal.grants):
        return _with_missing_extras(_extras_only(settings, machine, goal, facts, report, refused), machine, goal)
    gpus = {gpu for grant in goal.grants for gpu in grant.gpus}
    fabric = _fabric_report(_current(machine, goal, facts, report), gpus, previous)
    from_vendors = [_merge_vendors(kind, facts, goal.grants, fabric) for kind in FROM_VENDORS]
    said = tuple((each.gpu, each.state, each.status) for each in (*fabric.answers, *fabric.remembered))
    from_vendors = [
        each._replace(said=said if each.type is ConditionType.FABRIC_READY else None) for each in from_vendors
    ]
    inside = dict(_from_machine(machine, goal, facts, report))
    for kind, key in IF_CONFIGURED.items():
        if not getattr(settings, key):
            inside[kind] = not_applicable(kind, f"machines.{goal.name}.{key} is not set")
    conditions = _limited(
        [
            *from_vendors,
            _of_gpus(_driver_root_staged(goal, facts), _with_driver_files(goal)),
            _machine_running(machine),
            _devices_allowed(machine, goal, refused, inside[ConditionType.DEVICES_ALLOWED]),
            *(inside[kind] for kind in IN_MACHINE),
        ],
        gpus,
    )
    return _with_missing_extras((*conditions, summarize(conditions)), machine, goal)


def without_gpus(settings: MachineSettings, facts: Facts, machine: MachineFacts) -> tuple[Condition, ...]:
    """Return the conditions of a machine that gets no GPU.

    Such a machine may be Ready even if it does not run, because the agent may have nothing to do for it. So, if it
    does not run, the message of Ready says that.
    """
    reason, message, expected = Reason.NO_GPU, "this host has no GPU", _why_expected(settings, facts)
    if detached := sorted(gpu.pci_address for vendor in facts.vendors for gpu in vendor.gpus if gpu.detached):
        reason, expected = Reason.GPU_DETACHED, ""
        message = f"an administrator detached {', '.join(detached)}, and the machine has no other GPU"
    elif drivers := sorted({gpu.driver or "none" for vendor in facts.vendors for gpu in vendor.gpus}):
        reason, expected = Reason.NO_GPU_GRANTED, ""
        message = f"no GPU of this host has a driver that machines can use (drivers: {', '.join(drivers)})"
    running = ConditionType.MACHINE_RUNNING
    conditions = [
        _machine_running(machine) if kind is running else not_applicable(kind, message)
        for kind in ConditionType
        if kind is not ConditionType.READY
    ]
    aside = _unless_it_runs(machine)
    if settings.require_gpus:
        ready = false(ConditionType.READY, reason, f"{message}, and require_gpus is set for this machine{aside}")
    elif settings.require_gpus is None and expected:
        key = f"machines.{machine.name}.require_gpus"
        advice = f"see `lspci` and `dmesg`; if it is meant to have none, set {key} = false"
        ready = false(ConditionType.READY, reason, f"{message}, but {expected}: {advice}{aside}")
    else:
        ready = true(ConditionType.READY, reason, f"{message}: no GPU is set up{aside}")
    return (*conditions, ready)


def _why_expected(settings: MachineSettings, facts: Facts) -> str:
    """Return what says that a host is meant to have GPUs, for a host whose buses show none; empty if nothing says so.

    If all GPUs are dead when a host boots for the first time, it looks like a host without GPUs.
    """
    keys = [key for key in ("mig_config", "mig_monitor", "imex_channels", "sockets") if getattr(settings, key)]
    if settings.gpus != "all":
        return "the machine's setting `gpus` asks for some"
    if keys:
        return f"the machine's setting `{keys[0]}` needs some"
    for vendor in facts.vendors:
        if vendor.driver and isinstance(version := vendor.driver.user_space.version, str):
            return f"driver {version} is installed"
    return ""


def _unless_it_runs(machine: MachineFacts) -> str:
    """Return the end of a message: the machine starts, does not run, or was not observed; empty if it runs."""
    match machine.unit_state:
        case "active":
            return ""
        case "activating" | "reloading":
            return f"; machine {machine.name} is starting"
        case Unseen(why) | Broken(why) | Absent(why):
            return f"; whether machine {machine.name} runs is unknown: {why}"
        case _:
            return f"; machine {machine.name} does not run: see `systemctl status {machine_unit(machine.name)}`"


def _limited(conditions: list[Condition], gpus: Set[str]) -> list[Condition]:
    """Return the conditions. If no GPU of the machine is without a fault, no fault concerns only some GPUs."""
    if {gpu for each in conditions for gpu in each.gpus} < gpus:
        return conditions
    return [each._replace(gpus=()) for each in conditions]


def _extras_only(
    settings: MachineSettings,
    machine: MachineFacts,
    goal: MachineGoal,
    facts: Facts,
    report: Report | Absent | Broken | Unseen,
    refused: str | Unseen,
) -> tuple[Condition, ...]:
    """Return the conditions of a machine that gets no GPU, but perhaps other devices, mounts or CDI modes."""
    conditions = without_gpus(settings, facts, machine)
    inside, relayed = _from_machine(machine, goal, facts, report), {}
    if settings.extra_mounts or any(grant.nodes for grant in goal.grants):
        kind = ConditionType.DEVICES_ALLOWED
        relayed[kind] = _devices_allowed(machine, goal, refused, inside[kind])
    if settings.cdi_modes:
        relayed[ConditionType.CDI_SPEC_CURRENT] = inside[ConditionType.CDI_SPEC_CURRENT]
    return tuple(relayed.get(each.type, each) for each in conditions)


def _with_missing_extras(
    conditions: tuple[Condition, ...], machine: MachineFacts, goal: MachineGoal
) -> tuple[Condition, ...]:
    """Add to DevicesPresent's message which non-GPU devices and mounts are missing, and which mounts await a start.

    The status stays, because GPUs do not need these devices and mounts.
    """
    missing = [*(each for grant in goal.grants for each in grant.missing), *goal.missing]
    remark = f"; requested but missing: {', '.join(missing)}" if missing else ""
    if machine.unit_state == "active" and machine.live and machine.live.fixed == goal.live.fixed:
        at_next_start = [path for path in goal.live.mounts if path not in machine.live.mounts]
        remark += f"; mounted at the machine's next start: {', '.join(at_next_start)}" if at_next_start else ""
    return with_remark(conditions, ConditionType.DEVICES_PRESENT, remark) if remark else conditions


def with_rejected(conditions: tuple[Condition, ...], rejected: str) -> tuple[Condition, ...]:
    """Add to MachineRunning that the configuration was rejected, and that the last good one is in force.

    MachineRunning stays True, because pods do not suffer from that. If it is not True, it is not changed.
    """
    if not rejected:
        return conditions
    kind = ConditionType.MACHINE_RUNNING
    why = f"with the last good configuration, because the current one is invalid: {rejected}"
    advice = "correct it and run `systemctl reload unbounded-agent`"
    return tuple(
        true(kind, Reason.LAST_GOOD_SETTINGS, f"{each.message}, {why}; {advice}")
        if each.type is kind and each.status is Status.TRUE
        else each
        for each in conditions
    )


def _merge_vendors(kind: ConditionType, facts: Facts, grants: tuple[Grant, ...], fabric: FabricReport) -> Condition:
    """Return the worst of the vendors' conditions. Only vendors with a GPU or a problem in this machine count."""
    conditions = []
    for grant in grants:
        vendor = next(each for each in facts.vendors if each.vendor == grant.vendor)
        if grant.gpus or grant.problems:
            found = host_vendor(grant.vendor).conditions(vendor, grant, fabric)
            conditions += [_of_gpus(each, grant.gpus) for each in found if each.type is kind]
    return worst(conditions)


def _of_gpus(condition: Condition, gpus: tuple[str, ...]) -> Condition:
    """Return a condition about the driver of these GPUs. A fault concerns only them: `_limited` knows the others.

    That the settings ask for a GPU that is not there concerns the machine.
    """
    if condition.status is not Status.FALSE or not condition.needed_for_ready:
        return condition
    if condition.reason == Reason.GPU_NOT_FOUND:
        return condition
    return condition._replace(gpus=gpus)


def _with_driver_files(goal: MachineGoal) -> tuple[str, ...]:
    return tuple(gpu for grant in goal.grants if grant.driver_files for gpu in grant.gpus)


def _driver_root_staged(goal: MachineGoal, facts: Facts) -> Condition:
    kind = ConditionType.DRIVER_ROOT_STAGED
    roots = [grant.driver_root for grant in goal.grants if grant.driver_root]
    waiting = [_waiting(grant.waiting_root, facts) for grant in goal.grants if grant.waiting_root]
    if not any(grant.driver_files and (grant.gpus or grant.problems) for grant in goal.grants):
        return not_applicable(kind, "the granted GPUs need no driver files from the host")
    if not roots and waiting:
        return false(kind, Reason.NOTHING_FITS, f"no driver root fits the loaded kernel module; {'; '.join(waiting)}")
    if not any(grant.driver_files and grant.gpus for grant in goal.grants):
        return false(kind, Reason.NOTHING_TO_STAGE, "the machine gets no GPU that needs a driver; see DevicesPresent")
    if not roots:
        return false(kind, Reason.NOTHING_TO_STAGE, "the host has no complete driver to stage; see LibrariesPresent")
    for root in roots:
        if root not in facts.staged:
            problems = "".join(f"; {problem}" for problem in facts.staged_problems)
            message = f"driver {root.version} is not staged; `unbounded-agent apply` stages it or says why it cannot"
            return false(kind, Reason.NOT_STAGED, message + problems)
        if root.hidden:
            unit = mount_unit(driver_root(root.index))
            message = f"{_staged_as(root)}, but it is not mounted: see `systemctl status '{unit}'`"
            return false(kind, Reason.NOT_MOUNTED, message)
    staged = "; ".join([*(_staged_as(root) for root in roots), *waiting])
    plain = [str(root.index) for root in roots if root.index in facts.plain_roots]
    if plain:
        why = "a plain directory, which the root user of one machine can change for all"
        return true(kind, Reason.PLAIN_COPY, f"{staged}; driver root {', '.join(plain)} is {why}: {PLAIN_ADVICE}")
    return true(kind, Reason.STAGED, staged)


def _staged_as(root: StagedRoot) -> str:
    return f"driver {root.version} is staged as driver root {root.index}"


def _waiting(root: StagedRoot, facts: Facts) -> str:
    if root in facts.staged:
        return f"{_staged_as(root)}, but its kernel module is not loaded yet"
    return f"driver {root.version} is not staged yet, nor is its kernel module loaded"


def _machine_running(machine: MachineFacts) -> Condition:
    kind = ConditionType.MACHINE_RUNNING
    match machine.unit_state:
        case "active":
            return true(kind, Reason.RUNNING, f"machine {machine.name} is running")
        case "activating" | "reloading":
            return unknown(kind, Reason.STARTING, f"machine {machine.name} is starting")
        case Unseen(why) | Broken(why) | Absent(why):
            return unknown(kind, Reason.OBSERVATION_FAILED, why)
        case "inactive" if machine.has_run:
            unmask = f"`systemctl unmask {machine_unit(machine.name)}` and " if machine.masked else ""
            how = f"start it with {unmask}`unbounded-agent start {machine.name}`"
            return false(kind, Reason.STOPPED, f"machine {machine.name} was stopped; {how}")
        case "inactive":
            return false(
                kind, Reason.NOT_STARTED, f"machine {machine.name} has not started yet, or waits for its driver"
            )
        case state:
            return false(
                kind,
                Reason.NOT_RUNNING,
                f"systemd-nspawn@{machine.name}.service is {state}; see `journalctl -u systemd-nspawn@{machine.name}`",
            )


def _devices_allowed(machine: MachineFacts, goal: MachineGoal, refused: str | Unseen, inside: Condition) -> Condition:
    kind = ConditionType.DEVICES_ALLOWED
    if isinstance(refused, Unseen):
        return unknown(kind, Reason.OBSERVATION_FAILED, refused.why)
    if refused:
        return false(kind, Reason.FOREIGN_FILE, refused)
    if machine.unit_state != "active":
        return inside
    if machine.live_unseen:
        return unknown(kind, Reason.OBSERVATION_FAILED, machine.live_unseen)
    restart = restart_command(machine.name)
    if machine.live is None or machine.live.fixed != goal.live.fixed:
        why = f"machine {machine.name} was started with other settings; when its pods allow it, run {restart}"
        return false(kind, Reason.MACHINE_RESTART_NEEDED, why)
    missing = {path: path for path, number in goal.live.nodes.items() if machine.live.nodes.get(path) != number}
    missing |= {entry.node: str(entry) for entry in goal.live.allow if entry not in machine.live.allow}
    if missing:
        gpus: dict[str, str] = {}
        for node in (node for grant in goal.grants for node in grant.nodes):
            gpus |= dict.fromkeys((node.path, f"/dev/char/{node.number.major}:{node.number.minor}"), node.pci_address)
        concerned = dict.fromkeys(gpus.get(each, "") for each in missing)
        names = ", ".join(missing.values())
        why = f"could not give {names} to the running machine: the agent tries again; or run {restart}"
        return false(kind, Reason.NOT_GIVEN, why, concerned if all(concerned) else ())
    return inside


def _from_machine(
    machine: MachineFacts, goal: MachineGoal, facts: Facts, report: Report | Absent | Broken | Unseen
) -> Mapping[ConditionType, Condition]:
    """Return the conditions that the machine half reports. Without a current report, they are Unknown."""
    kinds = (ConditionType.DEVICES_ALLOWED, *IN_MACHINE)
    current = _current(machine, goal, facts, report)
    if not isinstance(current, Report):
        reason, message = current
        return {kind: unknown(kind, reason, message) for kind in kinds}
    missing = "the machine's report does not contain this condition; its image may have another release of the agent"
    relayed = {each.type: each._replace(message=f"{MACHINE_SAYS}{each.message}") for each in current.conditions}
    return {kind: relayed.get(kind) or unknown(kind, Reason.NOT_REPORTED, missing) for kind in kinds}


def _fabric_report(current: Report | tuple[Reason, str], gpus: Set[str], previous: Iterable[Condition]) -> FabricReport:
    """Return what the granted GPUs say, or said last. `current` is from `_current`."""
    answers: tuple[FabricAnswer, ...] = ()
    if not isinstance(current, Report):
        silence = current[1]
    else:
        silence = "the GPUs were asked in the machine, which asks again"
        answers = tuple(each for each in current.fabric if each.gpu in gpus)
    silent = gpus - {each.gpu for each in answers}
    before = next((each.said for each in previous if each.type is ConditionType.FABRIC_READY), None) or ()
    return FabricReport(answers, silence, tuple(each for each in starmap(FabricAnswer, before) if each.gpu in silent))


def _current(
    machine: MachineFacts, goal: MachineGoal, facts: Facts, report: Report | Absent | Broken | Unseen
) -> Report | tuple[Reason, str]:
    """Return the report if it is current; otherwise why it is not: a reason and a message."""
    if isinstance(machine.unit_state, Unseen):
        # While systemd does not answer, the machine most likely goes on running.
        return Reason.OBSERVATION_FAILED, machine.unit_state.why
    if machine.unit_state != "active":
        return Reason.MACHINE_NOT_RUNNING, f"machine {machine.name} is not running"
    match report:
        case Absent():
            return (
                Reason.NO_REPORT,
                "the machine has not reported: it may still be booting, or its image does not contain the machine "
                f"half; see `journalctl -M {machine.name} -u unbounded-agent-gpu`; if it shows no entries, build the "
                "image from containerfiles/",
            )
        case Broken(why):
            return Reason.BAD_REPORT, why
        case Unseen(why):
            return Reason.OBSERVATION_FAILED, why
        case _ if not answers(report, machine, goal):
            return Reason.HANDOFF_PENDING, refusal(report, machine) or why_unanswered(machine, goal, facts)
        case _ if machine.report_age > STALE_AFTER:
            return (
                Reason.REPORT_STALE,
                f"the machine's last report is {machine.report_age:.0f} s old; see "
                f"`systemctl -M {machine.name} status unbounded-agent-gpu.timer`",
            )
        case _:
            return report


# Evaluates the condition GPUsComplete: whether a machine has lost a GPU that it was granted. Pure.


KIND = ConditionType.GPUS_COMPLETE


def lost_gpus(machine: str, remembered: Seen[Remembered]) -> tuple[RememberedGpu, ...]:
    """Return the GPUs that the machine was granted and that are lost. Acknowledged losses are left out."""
    return tuple(gpu for gpu in _granted_gpus(machine, remembered) if gpu.lost)


def expected_gpus(wanted: str | list[str], had: Collection[str]) -> int:
    """Return how many GPUs a machine should have. `wanted` is its setting `gpus`; `had` are the GPUs it has or lost."""
    if wanted == "all":
        return len(had)
    return len(wanted) if isinstance(wanted, list) else int(wanted.removeprefix("count="))


def with_lost_gpus(
    conditions: Sequence[Condition], machine: str, remembered: Seen[Remembered]
) -> tuple[Condition, ...]:
    """Return the conditions with the current GPUsComplete, in the order of ConditionType.

    GPUsComplete makes Ready False only if the machine has no GPU left: one lost GPU does not make the others unusable.
    """
    complete = _complete(machine, remembered)
    remaining = [gpu for gpu in _granted_gpus(machine, remembered) if not gpu.lost]
    all_lost = complete.status is Status.FALSE and not remaining

    by_type = {each.type: each for each in conditions} | {KIND: complete}
    ready = by_type[ConditionType.READY]
    if all_lost and (ready.status is not Status.FALSE or ready.reason == Reason.NO_GPU):
        by_type[ConditionType.READY] = false(ConditionType.READY, Reason.GPU_LOST, f"{KIND}: {complete.message}")
    elif isinstance(remembered, Unseen) and (ready.status, ready.reason) == (Status.TRUE, Reason.NO_GPU):
        why = f"whether the machine has lost all its GPUs is unknown: {remembered.why}"
        by_type[ConditionType.READY] = unknown(ConditionType.READY, Reason.OBSERVATION_FAILED, why)
    return tuple(by_type[kind] for kind in ConditionType)


def _granted_gpus(machine: str, remembered: Seen[Remembered]) -> tuple[RememberedGpu, ...]:
    if not isinstance(remembered, Remembered):
        return ()
    return tuple(gpu for gpu in remembered.gpus if machine in gpu.machines)


def _complete(machine: str, remembered: Seen[Remembered]) -> Condition:
    if isinstance(remembered, Absent | Broken | Unseen):
        return unknown(KIND, Reason.OBSERVATION_FAILED, remembered.why)
    damage = (
        f"the record of granted GPUs was damaged, so GPUs lost before that are unknown ({remembered.damage}); check "
        "with `lspci` that no GPU is missing, then acknowledge the damage: `unbounded-agent gpus forget`"
    )
    if lost := lost_gpus(machine, remembered):
        gone = ", ".join(f"{gpu.describe()} since {rfc3339(gpu.lost)}" for gpu in lost)
        commands = ", ".join(f"`unbounded-agent gpus forget {gpu.pci_address}`" for gpu in lost)
        forget = f"{'if it' if len(lost) == 1 else 'for each GPU that'} was removed on purpose, run {commands}"
        message = (
            f"left the PCI bus without `unbounded-agent gpus detach`: {gone}; see `dmesg` and the server's hardware "
            f"log; {forget}"
        )
        return false(KIND, Reason.GPU_LOST, f"{message}; {damage}" if remembered.damage else message)
    if remembered.damage:
        return unknown(KIND, Reason.RECORD_DAMAGED, damage)
    if not _granted_gpus(machine, remembered):
        return not_applicable(KIND, "no GPU is granted")
    return true(KIND, Reason.COMPLETE, "every GPU that the machine was granted is on the PCI bus")


# Adds to MachineRunning that files in a machine differ from those that `up` put there. Pure.


NAMED = 3
"""How many changed files, or unknown conditions, a message names; it counts the others."""


def with_changed_files(
    conditions: Sequence[Condition], machine: MachineFacts, report: Report | None
) -> tuple[Condition, ...]:
    """Return the conditions. If MachineRunning is True and the report is current, add the changed files to its message.

    MachineRunning stays True: pods run, and only an administrator knows whether the change is intended.
    """
    current = machine.unit_state == "active" and machine.report_age <= STALE_AFTER
    if report is None or not report.changed_files or not current:
        return tuple(conditions)
    kind, files = ConditionType.MACHINE_RUNNING, first_of(report.changed_files, NAMED)
    says = f"{MACHINE_SAYS}files differ from those that `up` put into it: {files}"
    advice = f"undo the change, or make the machine again: `unbounded-agent up --rebuild {machine.name}`"
    return tuple(
        true(kind, Reason.NODE_FILES_CHANGED, f"{each.message}; {says}; {advice}")
        if each.type is kind and each.status is Status.TRUE
        else each
        for each in conditions
    )


# Adds to MachineRunning which of the machine's conditions this release does not know. Pure.


def with_ignored(
    conditions: Sequence[Condition], machine: MachineFacts, report: Report | None
) -> tuple[Condition, ...]:
    """Return the conditions. If the report is current, add to MachineRunning's message what this release ignores in it.

    No status changes: what the unknown conditions mean is not known, and all others still count.
    """
    current = machine.unit_state == "active" and machine.report_age <= STALE_AFTER
    if report is None or not report.unknown_conditions or not current:
        return tuple(conditions)
    remark = (
        f"; {MACHINE_SAYS}{first_of(report.unknown_conditions, NAMED)}, which this release does not know and ignores: "
        "install on the host the release of the agent that the machine's image has"
    )
    return with_remark(conditions, ConditionType.MACHINE_RUNNING, remark)


# Adjusts the conditions of a machine if it is unknown whether the machine exists. Pure.


def with_unseen_machine(conditions: Sequence[Condition], machine: MachineFacts) -> tuple[Condition, ...]:
    """Return the conditions. MachineRunning and Ready become Unknown if it is unknown whether the machine exists.

    That is so for users who may not read /var/lib/machines. But a machine exists if its unit runs. If its unit has
    stopped or failed to start since the host booted, MachineRunning is known; the machine may have been removed since.
    """
    if not isinstance(machine.root, Unseen) or not machine.ended:
        return tuple(conditions)
    why = f"whether machine {machine.name} exists is unknown: {machine.root.why}"
    changed = {ConditionType.MACHINE_RUNNING, ConditionType.READY}
    if machine.has_run:
        false_ready = any(each.type is ConditionType.READY and each.status is Status.FALSE for each in conditions)
        changed = set() if false_ready else {ConditionType.READY}
    return tuple(
        unknown(each.type, Reason.OBSERVATION_FAILED, why)
        if each.type in changed and each.status is not Status.UNKNOWN
        else each
        for each in conditions
    )


# Adjusts conditions by time and by the previous pass. Pure.
#
# Ready may have been lost too often; a start of the Fabric Manager, or GPUs' registration with it, may take too long;
# and what GPUs said of their fabric is remembered until they say something else.


WINDOW = 600.0
"""Seconds for which a loss of Ready is remembered."""
LOSSES = 4
"""Losses within WINDOW after which Ready must settle. Fewer losses may come from manual repairs or planned restarts."""
SETTLING = 60.0
"""Seconds without a further loss until Ready is True again."""
STARTING_LIMIT = 300.0
"""Seconds that Fabric Manager may take to start. On eight GPUs with NVSwitch it needs less than one minute."""
TOO_LATE: Mapping[str, Reason] = {
    Reason.FABRIC_MANAGER_STARTING: Reason.FABRIC_MANAGER_STUCK,
    Reason.FABRIC_REGISTERING: Reason.FABRIC_NOT_REGISTERED,
}
"""Reasons that become others after STARTING_LIMIT."""


def with_time(new: Sequence[Condition], old: Sequence[Condition], now: float) -> tuple[Condition, ...]:
    """Return the new conditions, Ready last, adjusted with the help of `old`, the conditions of the previous pass."""
    before = {each.type: each for each in old}
    others = [_adjusted(each, before.get(each.type), now) for each in new if each.type is not ConditionType.READY]
    ready = next(each for each in new if each.type is ConditionType.READY)
    if others != [each for each in new if each.type is not ConditionType.READY]:
        ready = summarize(others)
    return (
        *(_remembering(each, before.get(each.type)) for each in others),
        settled(ready, before.get(ready.type), now),
    )


def settled(ready: Condition, before: Condition | None, now: float) -> Condition:
    """Return Ready as users see it: False at once, but True only after a delay if Ready was lost too often.

    Only False counts as a loss. Unknown does not, because Ready is Unknown until a machine has answered a new handoff.
    """
    losses = tuple(at for at in (before.losses if before else ()) if now - at <= WINDOW)
    good_since = before.good_since if before else 0.0
    if ready.status is Status.FALSE:
        return ready._replace(losses=(*losses, now) if good_since else losses, good_since=0.0)
    if ready.status is Status.TRUE:
        good_since = good_since or now
        if len(losses) >= LOSSES and now - good_since < SETTLING:
            ready = false(
                ConditionType.READY,
                Reason.SETTLING,
                f"all conditions are met, but Ready was lost {len(losses)} times within {WINDOW / 60:.0f} minutes: "
                f"it becomes True at {rfc3339(good_since + SETTLING)} unless something fails before then",
            )
    return ready._replace(losses=losses, good_since=good_since)


def _remembering(condition: Condition, before: Condition | None) -> Condition:
    """Return the condition with what GPUs said last, also if they could not be heard in this pass."""
    return condition._replace(said=before.said) if before and condition.said is None else condition


def _adjusted(condition: Condition, before: Condition | None, now: float) -> Condition:
    """Return the condition, but with the status False if the fabric has not been ready for too long."""
    if condition.reason not in TOO_LATE or before is None:
        return condition
    # `last_transition` is when the status became Unknown. The reason may have been another one at first: that time
    # counts too, and the limit is reached sooner.
    waited, late = (
        now - before.last_transition if before.reason == condition.reason else 0.0,
        TOO_LATE[condition.reason],
    )
    if before.reason != late and waited <= STARTING_LIMIT:
        return condition
    if late != Reason.FABRIC_MANAGER_STUCK:
        return false(condition.type, late, condition.message, condition.gpus)
    return false(
        condition.type,
        late,
        f"{condition.message}, and has not finished within {STARTING_LIMIT / 60:.0f} minutes; see "
        "the unit's log, then restart the unit: `unbounded-agent doctor` shows the commands",
    )
