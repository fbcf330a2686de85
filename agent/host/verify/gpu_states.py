"""Evaluates the states of GPUs: those that a machine offers by Dynamic Resource Allocation, and the host's. Pure."""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import asdict, replace

from agent.host.vendors import host_vendor
from agent.model.conditions import Reason
from agent.model.contract import Effect, FencedGpu, GpuState, GpuStatus, GpuTestEnd
from agent.model.facts import (
    GPU_TEST,
    KERNEL_LOG,
    THE_GPU,
    Absent,
    Facts,
    Gpu,
    GpuFault,
    GpuTest,
    Granted,
    Placement,
    Remembered,
    RememberedGpu,
    Seen,
    VendorFacts,
    Verdict,
)
from agent.model.goal import MachineGoal
from agent.model.handoff import HealthAnswer, Report
from agent.model.text import rfc3339

DETACHING, TESTING, UNTESTED = "Detaching", "Testing", "Untested"
RECOVERY = "after a reset that neither reboots the host nor reloads the driver, run `unbounded-agent gpus attach {}`"


class Health(Struct, frozen=True):
    """What is known of one GPU's health. Of a healthy GPU, only the verdict is set."""

    verdict: Verdict
    reason: str = ""
    """One word, such as `Xid79`."""
    message: str = ""
    since: float = 0.0
    """When it was first known, in seconds since the epoch; 0 if the time is unknown."""
    source: str = ""
    """Who said so."""
    asked: float = 0.0
    """When the GPU itself answered last, in seconds since the epoch; 0 if it has not."""
    silence: str = ""
    """Why the GPU itself was not asked since, or did not answer (Silence); empty if nobody knows, or if it answered."""


def health(gpu: Gpu, facts: Facts, machine: str = "") -> Health:
    """Return the worst that is known of a GPU, from what is recorded and from what it says itself.

    What nobody says is never a fault. What the GPU says comes through a machine, which may lie: it counts for that
    `machine`, and for the host as a whole, without a machine's name, only if no other machine has the GPU. So a machine
    can only cost itself a GPU, and only one that it was granted. Of equally bad things, what is recorded counts.
    """
    recorded, answer = _recorded(gpu, facts), own_answer(gpu, facts, machine)
    if answer is None:
        return recorded
    word = host_vendor(gpu.vendor).judge(answer)
    found = recorded
    # What a GPU said before it lost its driver is no longer true.
    if gpu.driver and word.verdict.severity > recorded.verdict.severity:
        found = Health(word.verdict, word.reason, word.meaning, answer.since, THE_GPU)
    return replace(found, asked=answer.asked, silence=answer.silence)


def own_answer(gpu: Gpu, facts: Facts, machine: str = "") -> HealthAnswer | None:
    """Return what the GPU said of its health, if it counts, as in `health`.

    What it said before an administrator attached it does not.
    """
    # A machine whose grant could not be read may have any GPU.
    having = [
        each
        for each in facts.machines
        if gpu.pci_address in each.kept_gpus or not isinstance(each.granted, Granted | Absent)
    ]
    reports = [each.report for each in having if machine == each.name or (not machine and len(having) == 1)]
    answers = [each for report in reports if isinstance(report, Report) for each in report.health]
    since = facts.gpus.attached.get(gpu.pci_address, 0.0)
    return next((each for each in answers if each.gpu == gpu.pci_address and each.asked >= since), None)


def own_fault(gpu: Gpu, facts: Facts) -> GpuFault | None:
    """Return the error that the GPU names itself, if no new pod should get it. The record keeps it from then on.

    Otherwise a restart of the machine through which the GPU speaks would end it.
    """
    if not gpu.driver or (answer := own_answer(gpu, facts)) is None:
        return None
    word = host_vendor(gpu.vendor).judge(answer)
    if not word.verdict.fenced:
        return None
    fault = GpuFault(word.reason, word.meaning, answer.since, word.verdict, answer.asked, THE_GPU, until_answer=True)
    return replace(fault, own_word=word.verdict is Verdict.NEEDS_RESET)


def recovered_at(gpu: Gpu, facts: Facts) -> float:
    """Return when the GPU has withdrawn what is recorded against it, or its wish for a reset; 0 if it has not."""
    fault, answer = facts.gpus.faults.get(gpu.pci_address), own_answer(gpu, facts)
    if not fault or not answer or not answer.said or own_fault(gpu, facts):
        return 0.0
    if fault.source == GPU_TEST and not fault.own_word:
        return 0.0
    return answer.asked if fault.until_answer or host_vendor(gpu.vendor).needs_nothing(answer) else 0.0


def current_test(gpu: Gpu, facts: Facts, machine: str) -> GpuTest | None:
    """Return the GPU's last test if it still says something of the GPU in this machine."""
    test, driver = facts.gpus.tests.get(gpu.pci_address), module_version(gpu, facts)
    if not test or test.outdated or test.machine != machine or (test.driver and driver and test.driver != driver):
        return None
    return test


def needs_test(gpu: Gpu, facts: Facts, machine: str) -> bool:
    """Return whether to test the GPU now: it has no result, and works as far as anybody knows but a test."""
    found, works = health(gpu, facts, machine), gpu.driver and not gpu.why_lost and not gpu.detached
    fenced = found.verdict.fenced and found.source != GPU_TEST
    return bool(works) and not fenced and is_untested(gpu, facts, machine) and not current_test(gpu, facts, machine)


def why_failed(address: str, facts: Facts) -> str:
    """Return what is known of a GPU whose last test has failed, and what to do."""
    fault = facts.gpus.faults.get(address)
    again = f"its test failed; run `unbounded-agent gpus test {address}` when no other error of it is left"
    return fault.meaning if fault and fault.source == GPU_TEST else again


def module_version(gpu: Gpu, facts: Facts) -> str:
    """Return the version of the GPU's kernel module; empty if it is unknown."""
    versions = (each.driver.module_version for each in facts.vendors if each.vendor == gpu.vendor and each.driver)
    return next((each for each in versions if isinstance(each, str)), "")


def is_untested(gpu: Gpu, facts: Facts, machine: str) -> bool:
    """Return whether a GPU that can be tested has passed no test in this machine since it last changed."""
    test = current_test(gpu, facts, machine)
    return host_vendor(gpu.vendor).has_test and not (test and test.result == GpuTestEnd.PASSED)


def withheld(gpus: Iterable[str], facts: Facts) -> tuple[str, ...]:
    """Return those of the GPUs that nobody may open now: somebody takes them out of use, or they do not answer.

    A GPU that only has a verdict is asked on: by its own word, the verdict may end.
    """
    lost = {gpu.pci_address for vendor in facts.vendors for gpu in vendor.gpus if gpu.why_lost}
    return tuple(address for address in gpus if address in lost or address in facts.gpus.tainted)


def fenced_gpus(gpus: Iterable[str], facts: Facts, machine: str) -> tuple[FencedGpu, ...]:
    """Return those of the machine's GPUs that no new pod should get, because of what is known of their health."""
    wanted = set(gpus)
    present = [gpu for vendor in facts.vendors for gpu in vendor.gpus if gpu.pci_address in wanted]
    known = [(gpu.pci_address, health(gpu, facts, machine)) for gpu in present]
    return tuple(FencedGpu(address, each.reason) for address, each in known if each.verdict.fenced)


def _recorded(gpu: Gpu, facts: Facts) -> Health:
    known = [Health(Verdict.HEALTHY)]
    for address, fault in facts.gpus.faults.items():
        if address == gpu.pci_address or fault.vendor == gpu.vendor:
            known.append(Health(fault.verdict, fault.reason, fault.meaning, fault.since, fault.source))
    if gpu.why_lost:
        known.append(Health(Verdict.NEEDS_REBOOT, str(Reason.GPU_FALLEN_OFF_BUS), gpu.why_lost, source=KERNEL_LOG))
    elif not gpu.driver:
        known.append(Health(Verdict.UNKNOWN, str(Reason.NO_DRIVER), "it has no kernel driver"))
    return max(known, key=lambda each: each.verdict.severity)


def gpu_states(
    goal: MachineGoal, facts: Facts, remembered: Seen[Remembered], shared: bool = False, test_gpus: bool = False
) -> tuple[GpuStatus, ...]:
    """Return the states of the GPUs that the machine has, has lost, or that are detached from it.

    `shared` says whether pods may share them, `test_gpus` whether they must pass a test first.
    """
    present = {gpu.pci_address: gpu for vendor in facts.vendors for gpu in vendor.gpus}
    addresses = {address for grant in goal.grants for address in (*grant.gpus, *grant.detached)}
    states = [_state(present[address], facts, goal.name, test_gpus) for address in addresses if address in present]
    for gpu in remembered.gpus if isinstance(remembered, Remembered) else ():
        if gpu.lost and goal.name in gpu.machines:
            why = f"it left the PCI bus at {rfc3339(gpu.lost)} without `unbounded-agent gpus detach`"
            lost, since = (GpuState.LOST, str(Reason.GPU_LOST), why, Effect.NO_SCHEDULE), int(gpu.lost)
            states.append(GpuStatus(gpu.pci_address, gpu.vendor, *lost, since))
    return tuple(sorted(each._replace(shared=shared) for each in states))


def _state(gpu: Gpu, facts: Facts, machine: str, test_gpus: bool) -> GpuStatus:
    found, tainted = health(gpu, facts, machine), facts.gpus.tainted.get(gpu.pci_address)
    state, reason, message, since = GpuState.HEALTHY, "", "", 0.0
    if gpu.why_lost or not gpu.driver or found.verdict.fenced:
        state = GpuState.LOST if gpu.why_lost else GpuState.UNHEALTHY
        reason, message, since = found.reason, found.message, found.since
        if state is GpuState.UNHEALTHY and found.verdict is Verdict.NEEDS_RESET and found.source == KERNEL_LOG:
            message = f"{message}; {RECOVERY.format(gpu.pci_address)}"
    # Pods stay on a GPU that has failed: they are evicted only if an administrator detaches the GPU.
    effect = Effect.NONE if state is GpuState.HEALTHY else Effect.NO_SCHEDULE
    if tainted is not None:
        effect = Effect.NO_EXECUTE if tainted.evict else Effect.NO_SCHEDULE
        if state is GpuState.HEALTHY:
            state, reason, since = GpuState.DRAINING, TESTING if tainted.testing else DETACHING, tainted.since
            reset, detached = "it is being reset", "an administrator ran `unbounded-agent gpus detach` for it"
            detaching = reset if gpu.pci_address in facts.gpus.resetting else detached
            message = "`unbounded-agent gpus test` is testing it" if tainted.testing else detaching
    elif test_gpus and state is GpuState.HEALTHY and is_untested(gpu, facts, machine):
        state, effect, reason = GpuState.DRAINING, Effect.NO_SCHEDULE, UNTESTED
        message = "it has not passed its test since it last changed (test_gpus)"
    place = facts.gpus.placements.get(gpu.pci_address) or Placement()
    where = (effect, int(since), gpu.driver, place.numa_node, place.pcie_root)
    return GpuStatus(gpu.pci_address, gpu.vendor, state, reason, message, *where)


LOST = "lost"


class ListedGpu(RememberedGpu, frozen=True):
    """One GPU on the PCI bus, or one that machines have lost; docs/json.md describes the states."""

    state: str = ""
    health: str = str(Verdict.UNKNOWN)
    """The Verdict."""


def listed_gpus(facts: Facts, granted: Mapping[str, tuple[str, ...]]) -> Iterator[ListedGpu]:
    """Yield the host's GPUs, then the lost ones. `granted` has the names of each GPU's machines, by PCI address."""
    for vendor in facts.vendors:
        for gpu in vendor.gpus:
            machines = granted.get(gpu.pci_address, ())
            known = (gpu.pci_address, gpu.vendor, gpu.model, gpu.uuid, machines)
            yield ListedGpu(*known, state=gpu_state(gpu, vendor, machines), health=str(health(gpu, facts).verdict))
    for lost in facts.remembered.gpus if isinstance(facts.remembered, Remembered) else ():
        if lost.lost:
            yield ListedGpu(**asdict(lost), state=LOST)


def gpu_state(gpu: Gpu, vendor: VendorFacts, machines: tuple[str, ...]) -> str:
    """Return the state of a GPU on the PCI bus. If several states apply, the first of those below counts."""
    if gpu.detached:
        return "detached"
    if gpu.why_lost:
        # It is on the bus, but the kernel log says that it has stopped answering.
        return "failed"
    if not gpu.driver:
        return "no-driver"
    if gpu.driver not in host_vendor(gpu.vendor).drivers:
        return "other-driver"
    if gpu.excluded:
        return "excluded"
    if not isinstance(vendor.devices, tuple):
        return "unknown"
    return "granted" if machines else "free"
