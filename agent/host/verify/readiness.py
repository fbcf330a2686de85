"""Evaluates the conditions of one machine, from what both halves observe. Pure.

`conditions` builds each condition once.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import starmap

from msgspec import Struct

from agent.config.settings import MachineSettings
from agent.host.vendors import host_vendor
from agent.host.verify.answers import MACHINE_SAYS, STALE_AFTER, answers, why_unanswered
from agent.host.verify.gpu_states import current_test, health, is_untested, needs_test, why_failed
from agent.model.conditions import (
    Condition,
    ConditionType,
    Reason,
    Status,
    false,
    not_applicable,
    summarize,
    true,
    unknown,
    with_transitions,
    worst,
)
from agent.model.facts import Absent, Broken, Facts, MachineFacts, Remembered, RememberedGpu, Seen, Unseen, Verdict
from agent.model.goal import MachineGoal
from agent.model.handoff import FabricAnswer, Report, with_remark
from agent.model.paths import driver_root, machine_unit, mount_unit
from agent.model.text import counted, first_of, restart_command, rfc3339
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
VERDICTS = {
    Verdict.BROKEN: Reason.GPU_BROKEN,
    Verdict.NEEDS_REBOOT: Reason.GPU_NEEDS_REBOOT,
    Verdict.NEEDS_RESET: Reason.GPU_NEEDS_RESET,
    Verdict.DEGRADED: Reason.GPU_DEGRADED,
}
"""The reason of GPUsHealthy for each verdict that calls for an action, the worst first."""
NAMED = 3
"""How many changed files, or unknown conditions, a message names; it counts the others."""
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


class Case(Struct, frozen=True):
    """One machine in one pass: everything that its conditions follow from."""

    settings: MachineSettings
    machine: MachineFacts
    facts: Facts
    goal: MachineGoal | None = None
    """None if the machine gets nothing, or has a fault."""
    refused: str | Unseen = ""
    """Why the machine's settings files must not be written: empty if they may be, Unseen if the present files could not
    be read."""
    held: str = ""
    """The reason in `Plan.held`: the machine is missing, or a fact that its plan needs could not be observed."""
    fault: str = ""
    """An unexpected error in the work for the machine."""
    rejected: str = ""
    """Why the last good configuration is in force in place of the current one."""
    remembered: Seen[Remembered] = Remembered()
    previous: tuple[Condition, ...] = ()
    """The conditions of the previous pass."""
    now: float = 0.0

    @property
    def gpus(self) -> frozenset[str]:
        """PCI addresses of the granted GPUs."""
        return frozenset(gpu for grant in (self.goal.grants if self.goal else ()) for gpu in grant.gpus)

    @property
    def has_gpus(self) -> bool:
        """Whether the machine gets a GPU, or asks for one that it cannot get."""
        return any(grant.gpus or grant.problems for grant in (self.goal.grants if self.goal else ()))

    @property
    def missing(self) -> bool:
        """Whether there is no usable machine of this name."""
        return isinstance(self.machine.root, Absent | Broken)


def conditions(case: Case) -> tuple[Condition, ...]:
    """Return the conditions with their times, in the order of ConditionType, Ready last."""
    found = [_condition(kind, case) for kind in ConditionType if kind is not ConditionType.READY]
    found = _too_few(case, found)
    # If no GPU of the machine is without a fault, no fault concerns only some GPUs.
    if not {gpu for each in found for gpu in each.gpus} < case.gpus:
        found = [each._replace(gpus=()) for each in found]
    others = in_time(found, case.previous, case.now)
    before = next((each for each in case.previous if each.type is ConditionType.READY), None)
    ready = settled(_ready(case, others), before, case.now)
    # The remark is no part of Ready's message, because GPUs do not need these devices and mounts.
    if remark := _missing_extras(case):
        others = with_remark(others, ConditionType.DEVICES_PRESENT, remark)
    if isinstance(report := case.machine.report, Report) and report.cordon and case.settings.cordon_node:
        others = with_remark(others, ConditionType.GPUS_HEALTHY, f"; {MACHINE_SAYS}{report.cordon}")
    return with_transitions((*others, ready), case.previous, case.now)


def _condition(kind: ConditionType, case: Case) -> Condition:
    if kind is ConditionType.GPUS_COMPLETE:
        return _gpus_complete(case.machine.name, case.remembered)
    if case.fault:
        return unknown(kind, Reason.INTERNAL_ERROR, case.fault)
    if case.held and case.missing:
        make = false if kind is ConditionType.MACHINE_RUNNING else unknown
        return make(kind, Reason.NO_SUCH_MACHINE, case.held)
    if case.held:
        return unknown(kind, Reason.OBSERVATION_FAILED, case.held)
    if kind is ConditionType.MACHINE_RUNNING:
        return _machine_running(case)
    if case.goal and (case.has_gpus or kind in _extras(case.settings, case.goal)):
        return _with_goal(kind, case, case.goal)
    return not_applicable(kind, _without_gpu(case)[1])


def _extras(settings: MachineSettings, goal: MachineGoal) -> tuple[ConditionType, ...]:
    """Return the conditions that a machine without a GPU has for other devices, mounts and CDI modes."""
    extras: tuple[ConditionType, ...] = ()
    if settings.extra_mounts or any(grant.nodes for grant in goal.grants):
        extras += (ConditionType.DEVICES_ALLOWED,)
    return (*extras, ConditionType.CDI_SPEC_CURRENT) if settings.cdi_modes else extras


def _with_goal(kind: ConditionType, case: Case, goal: MachineGoal) -> Condition:
    if kind in FROM_VENDORS:
        return _of_vendors(kind, case, goal)
    if kind is ConditionType.GPUS_HEALTHY:
        return _gpus_healthy(case)
    if kind is ConditionType.GPUS_TESTED:
        return _gpus_tested(case)
    if kind is ConditionType.DRIVER_ROOT_STAGED:
        served = tuple(gpu for grant in goal.grants if grant.driver_files for gpu in grant.gpus)
        return _of_gpus(_driver_root_staged(goal, case.facts), served)
    if kind is ConditionType.DEVICES_ALLOWED and (unmet := _not_allowed(case, goal)):
        return unmet
    return _from_machine(kind, case, goal)


def _ready(case: Case, others: Collection[Condition]) -> Condition:
    """Return Ready as it follows from this pass alone."""
    kind, machine = ConditionType.READY, case.machine
    if case.fault:
        ready = unknown(kind, Reason.INTERNAL_ERROR, case.fault)
    elif case.held and case.missing:
        ready = false(kind, Reason.NO_SUCH_MACHINE, case.held)
    elif case.held or case.has_gpus:
        ready = summarize(others)
    else:
        ready = _ready_without_gpus(case)
    complete = next(each for each in others if each.type is ConditionType.GPUS_COMPLETE)
    # One lost GPU does not make the others unusable.
    all_lost = complete.status is Status.FALSE and all(
        gpu.lost for gpu in _remembered_gpus(machine.name, case.remembered)
    )
    if all_lost and (ready.status is not Status.FALSE or ready.reason == Reason.NO_GPU):
        ready = false(kind, Reason.GPU_LOST, f"{complete.type}: {complete.message}")
    elif isinstance(case.remembered, Unseen) and (ready.status, ready.reason) == (Status.TRUE, Reason.NO_GPU):
        why = f"whether the machine has lost all its GPUs is unknown: {case.remembered.why}"
        ready = unknown(kind, Reason.OBSERVATION_FAILED, why)
    unseen, false_for_sure = _perhaps_removed(machine), machine.has_run and ready.status is Status.FALSE
    if unseen and not false_for_sure and ready.status is not Status.UNKNOWN:
        ready = unknown(kind, Reason.OBSERVATION_FAILED, unseen)
    return ready


def _perhaps_removed(machine: MachineFacts) -> str:
    """Return a sentence if it is unknown whether the machine exists; otherwise nothing.

    That is so for users who may not read /var/lib/machines. But a machine exists if its unit runs. If its unit has
    stopped or failed to start since the host booted, MachineRunning is known; the machine may have been removed since.
    """
    if not isinstance(machine.root, Unseen) or not machine.ended:
        return ""
    return f"whether machine {machine.name} exists is unknown: {machine.root.why}"


def _without_gpu(case: Case) -> tuple[Reason, str]:
    """Return why the machine gets no GPU."""
    gpus = [gpu for vendor in case.facts.vendors for gpu in vendor.gpus]
    if detached := sorted(gpu.pci_address for gpu in gpus if gpu.detached):
        return Reason.GPU_DETACHED, f"detached or being reset: {', '.join(detached)}; the machine has no other GPU"
    if drivers := sorted({gpu.driver or "none" for gpu in gpus}):
        found = f"(drivers: {', '.join(drivers)})"
        return Reason.NO_GPU_GRANTED, f"no GPU of this host has a driver that machines can use {found}"
    return Reason.NO_GPU, "this host has no GPU"


def _ready_without_gpus(case: Case) -> Condition:
    """Return Ready of a machine that gets no GPU.

    Such a machine may be Ready even if it does not run, because the agent may have nothing to do for it. So, if it
    does not run, the message says that.
    """
    kind, settings, name, (reason, message) = ConditionType.READY, case.settings, case.machine.name, _without_gpu(case)
    match case.machine.unit_state:
        case "active":
            aside = ""
        case "activating" | "reloading":
            aside = f"; machine {name} is starting"
        case Unseen(why) | Broken(why) | Absent(why):
            aside = f"; whether machine {name} runs is unknown: {why}"
        case _:
            aside = f"; machine {name} does not run: see `systemctl status {machine_unit(name)}`"
    if settings.require_gpus:
        return false(kind, reason, f"{message}, and require_gpus is set for this machine{aside}")
    # If all GPUs are dead when a host boots for the first time, it looks like a host without GPUs. Something else may
    # say that it is meant to have some.
    drivers = (vendor.driver.user_space.version for vendor in case.facts.vendors if vendor.driver)
    keys = [
        key
        for key in ("mig_config", "mig_monitor", "imex_channels", "sockets", "min_healthy_gpus")
        if getattr(settings, key)
    ]
    if settings.gpus != "all":
        expected = "the machine's setting `gpus` asks for some"
    elif keys:
        expected = f"the machine's setting `{keys[0]}` needs some"
    else:
        expected = next((f"driver {each} is installed" for each in drivers if isinstance(each, str)), "")
    if settings.require_gpus is None and expected and reason is Reason.NO_GPU:
        advice = f"see `lspci` and `dmesg`; if it is meant to have none, set machines.{name}.require_gpus = false"
        return false(kind, reason, f"{message}, but {expected}: {advice}{aside}")
    return true(kind, reason, f"{message}: no GPU is set up{aside}")


def _missing_extras(case: Case) -> str:
    """Return which non-GPU devices and mounts are missing, and which mounts await a start; nothing if none is."""
    machine, goal = case.machine, case.goal
    if goal is None:
        return ""
    missing = [*(each for grant in goal.grants for each in grant.missing), *goal.missing]
    remark = f"; requested but missing: {', '.join(missing)}" if missing else ""
    if machine.unit_state == "active" and machine.live and machine.live.fixed == goal.live.fixed:
        at_next_start = [path for path in goal.live.mounts if path not in machine.live.mounts]
        remark += f"; mounted at the machine's next start: {', '.join(at_next_start)}" if at_next_start else ""
    return remark


def _of_vendors(kind: ConditionType, case: Case, goal: MachineGoal) -> Condition:
    """Return the worst of the vendors' conditions. Only vendors with a GPU or a problem in this machine count."""
    current = _current_report(case, goal)
    silence = "the GPUs were asked in the machine, which asks again" if isinstance(current, Report) else current[1]
    asked = current.fabric if isinstance(current, Report) else ()
    answered = tuple(each for each in asked if each.gpu in case.gpus)
    # What GPUs said of their fabric is remembered until they say something else.
    silent = case.gpus - {each.gpu for each in answered}
    before = next((each.said for each in case.previous if each.type is ConditionType.FABRIC_READY), None) or ()
    remembered = tuple(each for each in starmap(FabricAnswer, before) if each.gpu in silent)
    fabric, found = FabricReport(answered, silence, remembered), list[Condition]()
    for grant in goal.grants:
        vendor = next(each for each in case.facts.vendors if each.vendor == grant.vendor)
        if grant.gpus or grant.problems:
            evaluated = host_vendor(grant.vendor).conditions(vendor, grant, fabric)
            of_kind = (_of_gpus(each, grant.gpus) for each in evaluated if each.type is kind)
            found += [each._replace(vendors=(grant.vendor,)) for each in of_kind]
    said = tuple(each[:3] for each in (*answered, *remembered)) if kind is ConditionType.FABRIC_READY else None
    return worst(found)._replace(said=said)


def _of_gpus(condition: Condition, gpus: tuple[str, ...]) -> Condition:
    """Return a condition about the driver of these GPUs. A fault concerns only them: `conditions` knows the others.

    That the settings ask for a GPU that is not there concerns the machine.
    """
    if condition.status is not Status.FALSE or not condition.needed_for_ready:
        return condition
    return condition if condition.reason == Reason.GPU_NOT_FOUND else condition._replace(gpus=gpus)


def _gpus_healthy(case: Case) -> Condition:
    """Return GPUsHealthy. It is about the granted GPUs: GPUsComplete is about those that are gone.

    DevicesPresent reports GPUs without a driver, and those that have fallen off the bus.
    """
    kind = ConditionType.GPUS_HEALTHY
    gpus = [gpu for vendor in case.facts.vendors for gpu in vendor.gpus if gpu.pci_address in case.gpus]
    known = [(gpu, health(gpu, case.facts, case.machine.name)) for gpu in gpus if gpu.driver and not gpu.why_lost]
    bad = [(gpu, each) for verdict in VERDICTS for gpu, each in known if each.verdict is verdict]
    begun, grants = case.facts.gpus.begun, case.goal.grants if case.goal else ()
    own = [gpu for grant in grants for gpu in (*grant.gpus, *grant.detached) if gpu in begun and begun[gpu].why]
    stopped = [f"the reset of {gpu} waits: {begun[gpu].why}" for gpu in own if begun[gpu].what == "reset"]
    said = [f"{gpu.pci_address} {each.verdict.in_words}: {each.message}" for gpu, each in bad]
    message = "; ".join(said + stopped)
    if fenced := [gpu.pci_address for gpu, each in bad if each.verdict.fenced]:
        found = false(kind, VERDICTS[bad[0][1].verdict], message, fenced)
    elif bad:
        found = true(kind, Reason.GPU_DEGRADED, message)
    else:
        healthy = f"no fault is known of {counted(len(known), 'GPU')}"
        found = true(kind, Reason.HEALTHY, "; ".join((healthy, *stopped)))
    return found._replace(vendors=tuple(dict.fromkeys(gpu.vendor for gpu, _ in bad)))


def _gpus_tested(case: Case) -> Condition:
    """Return GPUsTested. Ready ignores it: with DRA, pods get no untested GPU, and else GPUsTested itself says so."""
    kind, name, facts = ConditionType.GPUS_TESTED, case.machine.name, case.facts
    if not case.settings.test_gpus:
        return not_applicable(kind, f"machines.{name}.test_gpus is not set")
    gpus = [gpu for vendor in facts.vendors for gpu in vendor.gpus if gpu.pci_address in case.gpus]
    gpus = [gpu for gpu in gpus if host_vendor(gpu.vendor).has_test]
    if not gpus:
        return not_applicable(kind, "the machine has no GPU that can be tested")
    tests = {gpu.pci_address: current_test(gpu, facts, name) for gpu in gpus}
    untested = [gpu for gpu in gpus if is_untested(gpu, facts, name)]
    if failed := [gpu.pci_address for gpu in untested if tests[gpu.pci_address]]:
        meaning = "; ".join(f"{each}: {why_failed(each, facts)}" for each in failed)
        return false(kind, Reason.TEST_FAILED, f"the test has not passed: {meaning}")
    if broken := [gpu.pci_address for gpu in untested if not needs_test(gpu, facts, name)]:
        return false(kind, Reason.NOT_TESTED, f"not tested before it works, see GPUsHealthy: {', '.join(broken)}")
    if any(taint.testing for gpu in untested if (taint := facts.gpus.tainted.get(gpu.pci_address))):
        return unknown(kind, Reason.TESTING, f"being tested: {', '.join(gpu.pci_address for gpu in untested)}")
    if untested:
        begun = [facts.gpus.begun.get(gpu.pci_address) for gpu in untested]
        whys = "; ".join(dict.fromkeys(each.why for each in begun if each and each.why))
        why = whys or "the service begins the test when the machine is ready"
        return unknown(kind, Reason.NOT_TESTED, f"not tested yet: {', '.join(g.pci_address for g in untested)}: {why}")
    first = min(each.at for each in tests.values() if each)
    return true(kind, Reason.TESTED, f"{counted(len(gpus), 'GPU')} passed the test, the first one at {rfc3339(first)}")


def _too_few(case: Case, found: list[Condition]) -> list[Condition]:
    """Return the conditions, with GPUsHealthy False for the whole machine if too few of its GPUs serve pods."""
    unusable = {gpu for each in found for gpu in each.gpus}
    left, minimum = len(case.gpus - unusable), case.settings.min_healthy_gpus
    if left >= minimum or not case.gpus:
        return found
    few = f"{counted(left, 'GPU')} can serve pods, but min_healthy_gpus is {minimum}; not these: "
    too_few = false(ConditionType.GPUS_HEALTHY, Reason.TOO_FEW_HEALTHY_GPUS, few + (", ".join(sorted(unusable)) or "-"))
    return [too_few if each.type is ConditionType.GPUS_HEALTHY else each for each in found]


def _driver_root_staged(goal: MachineGoal, facts: Facts) -> Condition:
    kind = ConditionType.DRIVER_ROOT_STAGED
    roots = [grant.driver_root for grant in goal.grants if grant.driver_root]
    staged_as = "driver {0.version} is staged as driver root {0.index}".format
    waiting = [
        f"{staged_as(root)}, but its kernel module is not loaded yet"
        if root in facts.staged
        else f"driver {root.version} is not staged yet, nor is its kernel module loaded"
        for root in (grant.waiting_root for grant in goal.grants)
        if root
    ]
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
            message = f"{staged_as(root)}, but it is not mounted: see `systemctl status '{unit}'`"
            return false(kind, Reason.NOT_MOUNTED, message)
    staged = "; ".join([*map(staged_as, roots), *waiting])
    if plain := [str(root.index) for root in roots if root.index in facts.plain_roots]:
        why = "a plain directory, which the root user of one machine can change for all"
        return true(kind, Reason.PLAIN_COPY, f"{staged}; driver root {', '.join(plain)} is {why}: {PLAIN_ADVICE}")
    return true(kind, Reason.STAGED, staged)


def _machine_running(case: Case) -> Condition:
    machine, kind, name = case.machine, ConditionType.MACHINE_RUNNING, case.machine.name
    match machine.unit_state:
        case "active":
            return _running(case)
        case "activating" | "reloading":
            return unknown(kind, Reason.STARTING, f"machine {name} is starting")
        case Unseen(why) | Broken(why) | Absent(why):
            return unknown(kind, Reason.OBSERVATION_FAILED, why)
        case _ if (unseen := _perhaps_removed(machine)) and not machine.has_run:
            return unknown(kind, Reason.OBSERVATION_FAILED, unseen)
        case "inactive" if machine.has_run:
            unmask = f"`systemctl unmask {machine_unit(name)}` and " if machine.masked else ""
            how = f"start it with {unmask}`unbounded-agent start {name}`"
            return false(kind, Reason.STOPPED, f"machine {name} was stopped; {how}")
        case "inactive":
            return false(kind, Reason.NOT_STARTED, f"machine {name} has not started yet, or waits for its driver")
        case state:
            unit = f"systemd-nspawn@{name}"
            return false(kind, Reason.NOT_RUNNING, f"{unit}.service is {state}; see `journalctl -u {unit}`")


def _running(case: Case) -> Condition:
    """Return MachineRunning of a machine that runs. It stays True, whatever else there is to say: pods run."""
    kind, name = ConditionType.MACHINE_RUNNING, case.machine.name
    reason, message = Reason.RUNNING, f"machine {name} is running"
    # The last report, on whatever handoff.
    fresh = case.goal is not None and case.machine.report_age <= STALE_AFTER
    report = case.machine.report if fresh else None
    if isinstance(report, Report) and report.unknown_conditions:
        says = f"; {MACHINE_SAYS}{first_of(report.unknown_conditions, NAMED)}"
        remark = f"{says}, which this release does not know: install on the host the release that its image has"
        (remarked,) = with_remark([true(kind, reason, message)], kind, remark)
        message = remarked.message
    if isinstance(report, Report) and report.changed_files and case.settings.node:
        # Only an administrator knows whether the change is intended.
        files = first_of(report.changed_files, NAMED)
        says = f"{MACHINE_SAYS}files differ from those that `up` put into it: {files}"
        advice = f"undo the change, or make the machine again: `unbounded-agent up --rebuild {name}`"
        reason, message = Reason.NODE_FILES_CHANGED, f"{message}; {says}; {advice}"
    if case.rejected:
        why = f"with the last good configuration, because the current one is invalid: {case.rejected}"
        advice = "correct it and run `systemctl reload unbounded-agent`"
        reason, message = Reason.LAST_GOOD_SETTINGS, f"{message}, {why}; {advice}"
    return true(kind, reason, message)


def _not_allowed(case: Case, goal: MachineGoal) -> Condition | None:
    """Return DevicesAllowed if it is not met on the host. Otherwise the machine's report decides: return None."""
    machine, kind = case.machine, ConditionType.DEVICES_ALLOWED
    if isinstance(case.refused, Unseen):
        return unknown(kind, Reason.OBSERVATION_FAILED, case.refused.why)
    if case.refused:
        return false(kind, Reason.FOREIGN_FILE, case.refused)
    if machine.unit_state != "active":
        return None
    if machine.live_unseen:
        return unknown(kind, Reason.OBSERVATION_FAILED, machine.live_unseen)
    restart = restart_command(machine.name)
    if machine.live is None or machine.live.fixed != goal.live.fixed:
        why = f"machine {machine.name} was started with other settings; when its pods allow it, run {restart}"
        return false(kind, Reason.MACHINE_RESTART_NEEDED, why)
    missing = {path: path for path, number in goal.live.nodes.items() if machine.live.nodes.get(path) != number}
    missing |= {entry.node: str(entry) for entry in goal.live.allow if entry not in machine.live.allow}
    if not missing:
        return None
    gpus: dict[str, str] = {}
    for node in (node for grant in goal.grants for node in grant.nodes):
        gpus |= dict.fromkeys((node.path, f"/dev/char/{node.number.major}:{node.number.minor}"), node.pci_address)
    concerned = dict.fromkeys(gpus.get(each, "") for each in missing)
    names = ", ".join(missing.values())
    why = f"could not give {names} to the running machine: the agent tries again; or run {restart}"
    return false(kind, Reason.NOT_GIVEN, why, concerned if all(concerned) else ())


def _from_machine(kind: ConditionType, case: Case, goal: MachineGoal) -> Condition:
    """Return a condition that the machine half reports. Without a current report, it is Unknown."""
    key = IF_CONFIGURED.get(kind)
    if key and not getattr(case.settings, key):
        return not_applicable(kind, f"machines.{goal.name}.{key} is not set")
    current = _current_report(case, goal)
    if not isinstance(current, Report):
        return unknown(kind, *current)
    found = next((each for each in current.conditions if each.type is kind), None)
    if found is None:
        missing = "the machine's report lacks this condition; its image may have another release of the agent"
        return unknown(kind, Reason.NOT_REPORTED, missing)
    return found._replace(message=f"{MACHINE_SAYS}{found.message}")


def _current_report(case: Case, goal: MachineGoal) -> Report | tuple[Reason, str]:
    """Return the report if it is current; otherwise why it is not: a reason and a message."""
    machine, report = case.machine, case.machine.report
    if isinstance(machine.unit_state, Unseen):
        # While systemd does not answer, the machine most likely goes on running.
        return Reason.OBSERVATION_FAILED, machine.unit_state.why
    if machine.unit_state != "active":
        return Reason.MACHINE_NOT_RUNNING, f"machine {machine.name} is not running"
    match report:
        case Absent():
            see = f"see `journalctl -M {machine.name} -u unbounded-agent-gpu`"
            why = "it may still be booting, or its image lacks the machine half (build it from containerfiles/)"
            return Reason.NO_REPORT, f"the machine has not reported: {why}; {see}"
        case Broken(why):
            return Reason.BAD_REPORT, why
        case Unseen(why):
            return Reason.OBSERVATION_FAILED, why
        case _ if not answers(report, machine, goal):
            return Reason.HANDOFF_PENDING, why_unanswered(machine, goal, case.facts)
        case _ if machine.report_age > STALE_AFTER:
            see = f"see `systemctl -M {machine.name} status unbounded-agent-gpu.timer`"
            return Reason.REPORT_STALE, f"the machine's last report is {machine.report_age:.0f} s old; {see}"
        case _:
            return report


# Lost GPUs.


def _remembered_gpus(machine: str, remembered: Seen[Remembered]) -> tuple[RememberedGpu, ...]:
    if not isinstance(remembered, Remembered):
        return ()
    return tuple(gpu for gpu in remembered.gpus if machine in gpu.machines)


def lost_gpus(machine: str, remembered: Seen[Remembered]) -> tuple[RememberedGpu, ...]:
    """Return the GPUs that the machine was granted and that are lost. Acknowledged losses are left out."""
    return tuple(gpu for gpu in _remembered_gpus(machine, remembered) if gpu.lost)


def expected_gpus(wanted: str | list[str], had: Collection[str]) -> int:
    """Return how many GPUs a machine should have. `wanted` is its setting `gpus`; `had` are the GPUs it has or lost."""
    if wanted == "all":
        return len(had)
    return len(wanted) if isinstance(wanted, list) else int(wanted.removeprefix("count="))


def _gpus_complete(machine: str, remembered: Seen[Remembered]) -> Condition:
    kind = ConditionType.GPUS_COMPLETE
    if isinstance(remembered, Absent | Broken | Unseen):
        return unknown(kind, Reason.OBSERVATION_FAILED, remembered.why)
    damage = f"the record of granted GPUs was damaged, so GPUs lost before that are unknown ({remembered.damage}); "
    damage += "check with `lspci` that none is missing, then acknowledge it: `unbounded-agent gpus forget`"
    if lost := lost_gpus(machine, remembered):
        gone = ", ".join(f"{gpu.describe()} since {rfc3339(gpu.lost)}" for gpu in lost)
        commands = ", ".join(f"`unbounded-agent gpus forget {gpu.pci_address}`" for gpu in lost)
        forget = f"{'if it' if len(lost) == 1 else 'for each GPU that'} was removed on purpose, run {commands}"
        see = "see `dmesg` and the server's hardware log"
        message = f"left the PCI bus without `unbounded-agent gpus detach`: {gone}; {see}; {forget}"
        return false(kind, Reason.GPU_LOST, f"{message}; {damage}" if remembered.damage else message)
    if remembered.damage:
        return unknown(kind, Reason.RECORD_DAMAGED, damage)
    if not _remembered_gpus(machine, remembered):
        return not_applicable(kind, "no GPU is granted")
    return true(kind, Reason.COMPLETE, "every GPU that the machine was granted is on the PCI bus")


# What changes with time: Ready may have been lost too often, and a start of the Fabric Manager, or GPUs' registration
# with it, may take too long.


def in_time(new: Iterable[Condition], old: Iterable[Condition], now: float) -> tuple[Condition, ...]:
    """Return the new conditions, with status False if the fabric has not been ready for too long.

    `old` are the conditions of the previous pass.
    """
    known, adjusted = {each.type: each for each in old}, []
    for each in new:
        before, late = known.get(each.type), TOO_LATE.get(each.reason)
        if before and each.said is None:
            each = each._replace(said=before.said)
        # `last_transition` is when the status became Unknown. The reason may have been another one at first: that time
        # counts too, and the limit is reached sooner.
        waited = now - before.last_transition if before and before.reason == each.reason else 0.0
        if before and late and (before.reason == late or waited > STARTING_LIMIT):
            each = each._replace(status=Status.FALSE, reason=late)
            if late is Reason.FABRIC_MANAGER_STUCK:
                minutes = f"{STARTING_LIMIT / 60:.0f} minutes"
                each = each._replace(
                    message=f"{each.message}, and has not finished within {minutes}; see the unit's log, then restart "
                    "the unit: `unbounded-agent doctor` shows the commands",
                    gpus=(),
                )
        adjusted.append(each)
    return tuple(adjusted)


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
