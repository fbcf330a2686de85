"""What GPUs say of themselves, on its whole way: the host asks, a machine reports, the host judges and publishes."""

import errno
import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.config.settings import Config
from agent.host.detach import attach
from agent.host.observe.machine import parse_report
from agent.host.reconcile import Reconciler
from agent.host.state.gpus import observe_gpus, record_fault, record_lost, record_recovered, record_tainted
from agent.host.verify.gpu_states import health
from agent.machine.run import run
from agent.model.conditions import ConditionType, Status
from agent.model.contract import (
    FencedGpu,
    GpuState,
    HealthQuestions,
    HostStatus,
    parse_gpu_states,
    parse_health_questions,
    parse_host_status,
)
from agent.model.errors import DocumentError
from agent.model.facts import THE_GPU, Facts, Gpu, GpuFacts, GpuFault, Granted, MachineFacts, Verdict
from agent.model.handoff import HealthAnswer, Report, render_report
from agent.model.paths import (
    HEALTH_NAME,
    MACHINE_HANDOFF_DIRECTORY,
    PCI_DEVICES,
    conditions_file,
    gpu_health_file,
    gpu_states_file,
    handoff_file,
)
from agent.vendors.nvidia.contract import RECOVERY_ACTION, REQUIRES_RESET
from tests.fakes.clock import Clock
from tests.fakes.facts import facts
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host
from tests.fakes.machine import GPUS, fabric_rows, gpu_machine, smi_health, systemctl
from tests.fakes.sound_host import ALL_OPEN, report, start

FIRST, SECOND = GPUS
FILE = gpu_health_file(MACHINE)
BAD = {"remapped_rows.failure": "Yes"}


@pytest.fixture
def agent(gpu_host: Host) -> Reconciler:
    """The agent of a host with a running machine that offers its GPUs by Dynamic Resource Allocation."""
    for address in GPUS:
        gpu_host.symlink(f"{PCI_DEVICES}/{address}", f"../../../devices/pci0000:00/{address}")
        gpu_host.symlink(f"/sys/devices/pci0000:00/{address}/driver", "../../../bus/pci/drivers/nvidia")
    agent = reconciler(gpu_host, allocation="dra")
    start(gpu_host, agent)
    return agent


def judged(agent: Reconciler) -> tuple[str, str]:
    """Make a pass. Return the reason of GPUsHealthy, and the state of the second GPU for pods."""
    (machine,) = agent.reconcile().machines
    found = next(each for each in machine.conditions if each.type is ConditionType.GPUS_HEALTHY)
    return found.reason, parse_gpu_states(agent.system.read(gpu_states_file(MACHINE)))[SECOND].state


def said(host: Host, words: dict[str, str], asked: float = 2000.0, gpu: str = SECOND) -> None:
    report(host, ALL_OPEN, health=(HealthAnswer(gpu, words, 1000.0, asked),))


def reset_needed(host: Host, verdict: Verdict = Verdict.NEEDS_RESET, at: float = 1500.0) -> None:
    assert record_fault(host, SECOND, GpuFault("Xid48", "Xid 48: simulated", at, verdict, at))


def test_the_way_from_the_host_to_the_gpus_and_back(
    agent: Reconciler, gpu_host: Host, tmp_path: Path, clock: Clock
) -> None:
    machine = gpu_machine(tmp_path / "in-machine")
    machine.program("nvidia-smi of fabric", fabric_rows(*GPUS, persistence="Enabled"))
    machine.program("nvidia-smi of health", smi_health(*GPUS, failure="Yes"))
    machine.program("systemctl", systemctl("inactive", 0, "dead"))
    machine.put(f"{MACHINE_HANDOFF_DIRECTORY}/{HEALTH_NAME}", gpu_host.read(FILE))
    for _ in range(2):
        run(machine)
        clock.sleep(60)
    found = parse_report(machine.read("/run/unbounded-agent/report/report.json"))
    assert [each.gpu for each in found.health] == [*GPUS]
    assert judged(agent) == ("Healthy", GpuState.HEALTHY)
    report(gpu_host, ALL_OPEN, health=found.health)
    assert judged(agent) == ("GPUBroken", GpuState.UNHEALTHY)
    status = parse_gpu_states(gpu_host.read(gpu_states_file(MACHINE)))[SECOND]
    assert (status.reason, status.since) == ("RowRemapFailure", int(found.health[1].since))
    assert "replace the GPU" in status.message


def test_what_the_host_asks(agent: Reconciler, gpu_host: Host) -> None:
    """Nobody may open a GPU that somebody takes out of use, or that is lost. No change makes a new handoff."""
    before = gpu_host.read(handoff_file(MACHINE))
    assert parse_health_questions(gpu_host.read(FILE)) == HealthQuestions(300.0)
    assert record_tainted(gpu_host, SECOND, evict=False)
    agent.reconcile()
    assert parse_health_questions(gpu_host.read(FILE)).withheld == (SECOND,)
    assert record_lost(gpu_host, FIRST, "simulated")
    # A verdict alone withholds nothing: only the GPU can say that it has recovered.
    agent.reconcile()
    assert parse_health_questions(gpu_host.read(FILE)).withheld == (FIRST, SECOND)
    assert gpu_host.read(handoff_file(MACHINE)) == before
    agent.config = Config.validated({"machines": {MACHINE: {}}, "gpu_health": {"interval": 0}})
    agent.reconcile()
    assert not gpu_host.exists(FILE)


@pytest.mark.parametrize(("action", "own_word"), [("Reset", True), ("Drain and Reset", True), ("Reboot", False)])
def test_that_a_gpu_asks_for_a_reset_is_recorded(
    agent: Reconciler, gpu_host: Host, action: str, own_word: bool
) -> None:
    said(gpu_host, {RECOVERY_ACTION: action})
    agent.reconcile()
    assert observe_gpus(gpu_host).faults[SECOND].own_word is own_word


def test_a_gpu_with_a_verdict_is_asked_on(agent: Reconciler, gpu_host: Host) -> None:
    reset_needed(gpu_host)
    assert judged(agent) == ("GPUNeedsReset", GpuState.UNHEALTHY)
    assert parse_health_questions(gpu_host.read(FILE)).withheld == ()


@pytest.mark.parametrize(
    ("words", "verdict", "asked", "recovers"),
    [
        ({RECOVERY_ACTION: "None"}, Verdict.NEEDS_RESET, 1561.0, True),
        ({RECOVERY_ACTION: "None"}, Verdict.NEEDS_REBOOT, 1561.0, True),
        ({RECOVERY_ACTION: "None"}, Verdict.NEEDS_RESET, 1559.0, False),
        ({RECOVERY_ACTION: "None"}, Verdict.BROKEN, 1561.0, False),
        ({RECOVERY_ACTION: "Reset"}, Verdict.NEEDS_RESET, 1561.0, False),
        ({RECOVERY_ACTION: "None", **BAD}, Verdict.NEEDS_RESET, 1561.0, False),
        # To say nothing is not to say that all is well.
        ({}, Verdict.NEEDS_RESET, 1561.0, False),
    ],
)
def test_the_gpus_own_word_ends_an_error_once(
    agent: Reconciler,
    gpu_host: Host,
    words: dict[str, str],
    verdict: Verdict,
    asked: float,
    recovers: bool,
) -> None:
    """Before, the fault stayed after each reset until `gpus attach`."""
    reset_needed(gpu_host, verdict)
    said(gpu_host, words, asked)
    found = judged(agent)
    assert (SECOND not in observe_gpus(gpu_host).faults) is recovers
    assert (found == ("Healthy", GpuState.HEALTHY)) is recovers
    if recovers:
        assert judged(agent) == ("Healthy", GpuState.HEALTHY)
        reset_needed(gpu_host, verdict, asked + 1)
        assert judged(agent)[1] == GpuState.UNHEALTHY, "a later error counts"


def test_attach_forgets_what_the_gpu_said_before(agent: Reconciler, gpu_host: Host) -> None:
    """Otherwise a GPU that nobody may use would never be asked again, and so stay unhealthy."""
    said(gpu_host, {RECOVERY_ACTION: "Reset"})
    assert judged(agent) == ("GPUNeedsReset", GpuState.UNHEALTHY)
    assert "counts as healthy again" in attach(SECOND, agent).sentences[0]
    assert judged(agent) == ("Healthy", GpuState.HEALTHY)
    said(gpu_host, {RECOVERY_ACTION: "Reset"}, asked=time.time() + 1)
    assert judged(agent) == ("GPUNeedsReset", GpuState.UNHEALTHY)


@pytest.mark.parametrize("seen", [False, True])
def test_a_word_from_before_the_driver_was_bound_again_does_not_count(
    agent: Reconciler, gpu_host: Host, seen: bool
) -> None:
    """Its machine repeats it until it runs again. If the GPU is idle then, nobody asks it, and it stayed fenced."""
    said(gpu_host, {RECOVERY_ACTION: "Reset"})
    assert judged(agent) == ("GPUNeedsReset", GpuState.UNHEALTHY)
    link = Path(gpu_host.root, f"sys/devices/pci0000:00/{SECOND}/driver")
    # The file system of the test must not use the number of the link again.
    link.rename(link.with_name("before"))
    if seen:
        gpu_host.rebind(SECOND, "")
        judged(agent)
        gpu_host.rebind(SECOND, "nvidia")
    link.symlink_to("../../../bus/pci/drivers/nvidia")
    assert judged(agent) == ("Healthy", GpuState.HEALTHY)
    assert judged(agent) == ("Healthy", GpuState.HEALTHY), "nor later"
    said(gpu_host, {RECOVERY_ACTION: "Reset"}, asked=time.time() + 1)
    assert judged(agent) == ("GPUNeedsReset", GpuState.UNHEALTHY)


def test_the_drivers_later_word_counts_against_the_gpus_own_recovery_action_only(
    agent: Reconciler, gpu_host: Host
) -> None:
    """Before, an idle GPU, which nobody asks, stayed fenced; and a restart of its machine made a broken one healthy."""
    said(gpu_host, {RECOVERY_ACTION: "Reset"})
    assert judged(agent) == ("GPUNeedsReset", GpuState.UNHEALTHY)
    assert record_recovered(gpu_host, SECOND)
    assert judged(agent) == ("Healthy", GpuState.HEALTHY)
    said(gpu_host, BAD, asked=time.time() + 1)
    assert judged(agent) == ("GPUBroken", GpuState.UNHEALTHY)
    report(gpu_host, ALL_OPEN)
    assert not record_recovered(gpu_host, SECOND)
    assert judged(agent) == ("GPUBroken", GpuState.UNHEALTHY)


HAS, OTHER = "a", "b"


def known(gpus: dict[str, tuple[str, ...]], faults: dict[str, GpuFault], driver: str = "nvidia") -> tuple[Gpu, Facts]:
    """Return the second GPU, and facts of machines with these GPUs, each of which says that all GPUs are broken."""
    gpu = Gpu(SECOND, "nvidia", driver)
    answers = tuple(HealthAnswer(each, BAD, 1000.0, 2000.0, "Withheld") for each in GPUS)
    machines = tuple(
        MachineFacts(
            name=name,
            root=f"/{name}",
            unit_state="active",
            granted=Granted("", its, {}),
            report=Report("", (), health=answers),
        )
        for name, its in gpus.items()
    )
    return gpu, replace(facts(), machines=machines, gpus=GpuFacts(faults))


LOGGED = GpuFault("Xid48", "Xid 48", 1500.0, Verdict.NEEDS_RESET, 1500.0)
BROKEN = (Verdict.BROKEN, "RowRemapFailure", "the GPU", 1000.0)
HEALTHY = (Verdict.HEALTHY, "", "", 0.0)


@pytest.mark.parametrize(
    ("gpus", "faults", "machine", "found"),
    [
        ({HAS: (SECOND,)}, {}, "", BROKEN),
        ({HAS: (SECOND,)}, {}, HAS, BROKEN),
        # A machine that does not have the GPU, or not alone, costs nobody else the GPU.
        ({HAS: (SECOND,), OTHER: (FIRST,)}, {}, OTHER, HEALTHY),
        ({HAS: (FIRST,)}, {}, "", HEALTHY),
        ({HAS: (SECOND,), OTHER: (SECOND,)}, {}, "", HEALTHY),
        ({HAS: (SECOND,), OTHER: (SECOND,)}, {}, HAS, BROKEN),
        # The worst counts; for equally bad ones, the kernel log.
        ({HAS: (SECOND,)}, {SECOND: LOGGED}, "", BROKEN),
        (
            {HAS: (SECOND,)},
            {SECOND: GpuFault("Xid1", "Xid 1", 1.0, Verdict.BROKEN, 1.0)},
            "",
            (Verdict.BROKEN, "Xid1", "kernel log", 1.0),
        ),
        ({}, {SECOND: LOGGED}, "", (Verdict.NEEDS_RESET, "Xid48", "kernel log", 1500.0)),
    ],
)
def test_who_may_say_what_of_a_gpu(
    gpus: dict[str, tuple[str, ...]],
    faults: dict[str, GpuFault],
    machine: str,
    found: tuple[Verdict, str, str, float],
) -> None:
    seen = health(*known(gpus, faults), machine)
    assert (seen.verdict, seen.reason, seen.source, seen.since) == found
    if seen.source == THE_GPU:
        assert (seen.asked, seen.silence) == (2000.0, "Withheld")


def test_a_gpu_without_a_driver_says_nothing() -> None:
    assert health(*known({HAS: (SECOND,)}, {}, driver="")).verdict is Verdict.UNKNOWN


GOOD = HealthAnswer(SECOND, {RECOVERY_ACTION: REQUIRES_RESET}, 1000.0, 2000.0, "NoAnswer")


@pytest.mark.parametrize(
    "health",
    [
        (GOOD._replace(gpu="../x"),),
        (GOOD._replace(said={"gpu_recovery_action": "run `rm -rf /`"}),),
        (GOOD._replace(said={"gpu_recovery_action": "x" * 65}),),
        (GOOD._replace(said={"gpu_recovery_action": "Reset\n"}),),
        (GOOD._replace(said={"Field with words": "Yes"}),),
        (GOOD._replace(said={f"field{number}": "Yes" for number in range(33)}),),
        (GOOD._replace(since=-1.0),),
        (GOOD._replace(asked=float(1 << 36)),),
        (GOOD._replace(silence="not a word"),),
        (GOOD, GOOD),
        tuple(GOOD._replace(gpu=f"0000:{number >> 5:02x}:{number & 31:02x}.0") for number in range(1025)),
    ],
)
def test_a_hostile_report_is_refused(health: tuple[HealthAnswer, ...]) -> None:
    assert parse_report(render_report(Report("0" * 16, (), publication=None, health=(GOOD,)))).health == (GOOD,)
    with pytest.raises(DocumentError, match="health"):
        parse_report(render_report(Report("0" * 16, (), publication=None, health=health)))


def test_a_report_of_an_older_release_says_nothing_of_health(agent: Reconciler, gpu_host: Host) -> None:
    text = render_report(Report("0" * 16, ()))
    assert b'"health"' in text
    assert parse_report(text.replace(b'"health"', b'"unknown"')).health == ()
    assert judged(agent)[0] == "Healthy"
    (machine,) = agent.reconcile().machines
    assert machine.ready.status is Status.TRUE


def test_a_restart_of_the_machine_does_not_end_what_the_gpu_said(agent: Reconciler, gpu_host: Host) -> None:
    """In a machine that has just started, nobody has asked the GPU yet. Only another answer of the GPU ends it."""
    said(gpu_host, BAD)
    assert judged(agent) == ("GPUBroken", GpuState.UNHEALTHY)
    report(gpu_host, ALL_OPEN)
    assert judged(agent) == ("GPUBroken", GpuState.UNHEALTHY)
    assert observe_gpus(gpu_host).faults[SECOND].source == THE_GPU
    said(gpu_host, {RECOVERY_ACTION: "None"}, asked=2030.0)
    assert judged(agent) == ("GPUBroken", GpuState.UNHEALTHY), "too close to the error to be sure what came first"
    said(gpu_host, {RECOVERY_ACTION: "None"}, asked=2061.0)
    assert judged(agent) == ("Healthy", GpuState.HEALTHY)


def test_an_answer_from_the_future_does_not_count(agent: Reconciler, gpu_host: Host) -> None:
    reset_needed(gpu_host)
    said(gpu_host, {RECOVERY_ACTION: "None"}, asked=float(1 << 35))
    assert judged(agent) == ("GPUNeedsReset", GpuState.UNHEALTHY)


def test_an_error_of_what_all_gpus_need_concerns_them_all(agent: Reconciler, gpu_host: Host) -> None:
    switch = "0000:05:00.0"
    gpu_host.symlink(f"/sys/bus/pci/devices/{switch}", f"../../../devices/pci0000:00/{switch}")
    fault = GpuFault("SXid20034", "a fatal error", 1500.0, Verdict.NEEDS_RESET, 1500.0, vendor="nvidia")
    assert record_fault(gpu_host, switch, fault)
    (machine,) = agent.reconcile().machines
    found = machine.condition(ConditionType.GPUS_HEALTHY)
    assert (found.status, found.reason) == (Status.FALSE, "GPUNeedsReset")
    assert all(f"{each} needs a reset: a fatal error" in found.message for each in GPUS)
    assert machine.ready.status is Status.FALSE
    assert "counts as healthy again" in attach(SECOND, agent).sentences[0]
    assert agent.reconcile().machines[0].ready.status is Status.TRUE


# The cordon of a machine whose GPUs a device plugin offers.


def wished(agent: Reconciler) -> HostStatus | None:
    """Make a pass, and return what the machine should do to its Node."""
    agent.reconcile()
    path = conditions_file(MACHINE)
    return parse_host_status(agent.system.read(path)) if agent.system.exists(path) else None


def test_a_machine_with_a_device_plugin_is_told_which_gpus_are_fenced(agent: Reconciler, gpu_host: Host) -> None:
    """In a document that only exists meanwhile: other machines start no process for it each minute."""
    agent.config = reconciler(gpu_host).config
    assert wished(agent) is None
    assert record_fault(gpu_host, SECOND, GpuFault("Xid48", "simulated", 1e9, Verdict.NEEDS_RESET, 1e9))
    found = wished(agent)
    assert found
    assert (found.node_condition, found.fenced) == (False, (FencedGpu(SECOND, "Xid48"),))
    agent.config = reconciler(gpu_host, node_condition=True).config
    found = wished(agent)
    assert found
    assert (found.node_condition, found.fenced) == (True, (FencedGpu(SECOND, "Xid48"),))
    for settings in ({"allocation": "dra"}, {"cordon_node": False}):
        agent.config = reconciler(gpu_host, **settings).config
        assert wished(agent) is None
    agent.config = reconciler(gpu_host).config
    assert wished(agent)
    assert attach(SECOND, agent).done
    assert wished(agent) is None


@pytest.mark.parametrize("verdict", [Verdict.DEGRADED, Verdict.NEEDS_REBOOT, Verdict.BROKEN])
def test_only_verdicts_that_fence_cordon(agent: Reconciler, gpu_host: Host, verdict: Verdict) -> None:
    agent.config = reconciler(gpu_host).config
    assert record_fault(gpu_host, SECOND, GpuFault("Xid48", "simulated", time.time(), verdict, time.time()))
    assert bool(wished(agent)) is verdict.fenced


def test_a_machine_that_is_held_keeps_its_cordon(agent: Reconciler, gpu_host: Host) -> None:
    """What cannot be observed is no recovery."""
    agent.config = reconciler(gpu_host).config
    assert record_fault(gpu_host, SECOND, GpuFault("Xid48", "simulated", 1e9, Verdict.NEEDS_RESET, 1e9))
    assert wished(agent)
    gpu_host.failing["/proc/driver/nvidia/gpus"] = OSError(errno.EIO, os.strerror(errno.EIO))
    assert wished(agent)


def test_gpus_healthy_has_what_the_machine_says_of_the_cordon(agent: Reconciler, gpu_host: Host) -> None:
    for cordon_node in (True, False):
        agent.config = reconciler(gpu_host, cordon_node=cordon_node).config
        report(gpu_host, cordon="the node is cordoned\x1b[2J")
        (machine,) = agent.reconcile().machines
        message = machine.condition(ConditionType.GPUS_HEALTHY).message
        assert message.endswith(r"; machine says: the node is cordoned\x1b[2J") is cordon_node
        assert "cordoned" not in machine.ready.message
