"""What the service begins by itself: it starts a unit, whose work is done here when a test asks for it."""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.config.settings import Config
from agent.host import gpu_recovery
from agent.host.detach import attach, detach
from agent.host.gpu_recovery import AGAIN, LATEST, UNIT, begin, work
from agent.host.gpu_tests import run_tests
from agent.host.reconcile import Reconciler
from agent.host.state.gpus import forget_tests, observe_gpus, record_fault, record_recovered
from agent.model.conditions import ConditionType
from agent.model.contract import (
    Effect,
    GpuTestEnd,
    GpuTestResult,
    GpuTestResults,
    parse_gpu_states,
    parse_test_request,
    render_test_results,
)
from agent.model.errors import BusAnswerError
from agent.model.facts import GPU_TEST, THE_GPU, GpuFault, Verdict
from agent.model.paths import (
    GPU_RESETS,
    GPU_TESTS_NAME,
    GPUS,
    RUNTIME,
    WAKE,
    gpu_states_file,
    gpu_test_file,
    report_directory,
)
from tests.fakes.clock import Clock
from tests.fakes.command import Capture, command
from tests.fakes.detach_site import FAST, HOLDER, Interrupted, Site
from tests.fakes.gpu_host import MACHINE
from tests.fakes.processes import POD_GROUP
from tests.fakes.smi import FIRST, IN_USE, LINKED, SECOND, Smi

UNTESTED, NONE = ("Untested", Effect.NO_SCHEDULE), ("", Effect.NONE)
RESET = {"policy": "reset"}
WALL = time.time


class Served(Site):
    """A host whose service decides after each pass, and whose machine tests what it is asked to test."""

    gate: bool
    recovery: object
    end, message = GpuTestEnd.PASSED, ""
    """How the tests of the second GPU end. Those of the first pass."""
    tests = 0
    now = 0.0
    """Seconds by which the clock has moved."""

    def configure(self, **settings: object) -> Reconciler:
        machine = {"allocation": "dra", "test_gpus": self.gate, **settings}
        config = Config.validated({"machines": {MACHINE: machine}, "gpu_recovery": self.recovery})
        self.agent = Reconciler(config, self.host, self.host, self.messages.append)
        return self.agent

    def wait(self) -> None:
        super().wait()
        if self.host.exists(gpu_test_file(MACHINE)):
            request, results = parse_test_request(self.host.read(gpu_test_file(MACHINE))), []
            for gpu in request.gpus:
                end, message = (self.end, self.message) if gpu.pci_address == SECOND else (GpuTestEnd.PASSED, "")
                results.append(GpuTestResult(gpu.pci_address, "", end, message=message))
            self.tests += len(results)
            said = GpuTestResults(request.id, True, tuple(results))
            self.host.write(f"{report_directory(MACHINE)}/{GPU_TESTS_NAME}", render_test_results(said))

    def serve(self) -> bool:
        """Let the service make a pass. Return whether it has started the unit."""
        self.host.bus.started.clear()
        self.stopped = begin(self.agent.config, self.host, self.agent.reconcile())
        assert self.host.bus.started in ([], [UNIT])
        return bool(self.host.bus.started)

    def serve_and_work(self) -> bool:
        started = self.serve()
        if started:
            work(self.agent, FAST)
        return started

    def later(self, seconds: float) -> None:
        self.now += seconds

    def state(self, address: str = SECOND) -> tuple[str, Effect]:
        found = parse_gpu_states(self.host.read(gpu_states_file(MACHINE)))[address]
        return found.reason, found.effect

    def said(self, kind: ConditionType) -> tuple[str, str, str]:
        (machine,) = self.agent.reconcile().machines
        found = machine.condition(kind)
        return found.status, found.reason, found.message

    @property
    def tested(self) -> tuple[str, str]:
        return self.said(ConditionType.GPUS_TESTED)[:2]

    def asks_for_reset(self, address: str = SECOND, own_word: bool = True, source: str = "kernel log") -> None:
        at = time.time()
        fault = GpuFault("Xid154", "Xid 154: simulated", at, Verdict.NEEDS_RESET, at, source, own_word=own_word)
        assert record_fault(self.host, address, fault)

    def link_driver(self, address: str) -> None:
        link = Path(self.host.root, f"sys/devices/pci0000:00/{address}/driver")
        if link.is_symlink():
            link.rename(link.with_name(f"before-{time.monotonic()}"))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to("../../../bus/pci/drivers/nvidia")


def made(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Served:
    Served.gate, Served.recovery = bool(settings.pop("gate", True)), dict(settings.pop("recovery", {}))  # type: ignore[call-overload]
    site = Served(tmp_path / "host", clock)
    monkeypatch.setattr(time, "time", lambda: WALL() + site.now)
    site.configure(**settings)
    site.host.bus.unit(UNIT, "inactive")
    for address in (FIRST, SECOND):
        site.link_driver(address)
    site.start()
    return site


@pytest.fixture
def site(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Served:
    """The machine must test its GPUs."""
    return made(tmp_path, clock, monkeypatch)


@pytest.fixture
def resetting(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Served:
    """GPUs are reset, and not tested."""
    return made(tmp_path, clock, monkeypatch, gate=False, recovery=RESET)


@pytest.fixture
def smi(resetting: Served) -> Smi:
    return Smi(resetting)


# The test.


def test_no_pod_gets_a_gpu_before_it_has_passed_its_test(site: Served) -> None:
    assert (site.state(FIRST), site.state()) == (UNTESTED, UNTESTED)
    assert site.tested == ("Unknown", "NotTested")
    assert site.said(ConditionType.READY)[0] == "True"
    assert site.serve_and_work()
    assert (site.state(FIRST), site.state()) == (NONE, NONE)
    status, reason, message = site.said(ConditionType.GPUS_TESTED)
    assert (status, reason) == ("True", "Tested")
    assert re.fullmatch(r"2 GPUs passed the test, the first one at \d{4}-.*Z", message)
    assert site.host.exists(WAKE), "the service makes a pass"
    assert not observe_gpus(site.host).begun
    site.later(86400)
    assert not site.serve_and_work()
    assert site.tests == 2


def test_without_the_setting_nothing_is_tested(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    site = made(tmp_path, clock, monkeypatch, gate=False)
    assert site.state() == NONE
    assert not site.serve()
    assert site.tested == ("True", "NotApplicable")


def rebind(site: Served) -> None:
    site.link_driver(SECOND)


def upgrade(site: Served) -> None:
    site.host.file("/sys/module/nvidia/version", "560.35.03\n")


def attach_again(site: Served) -> None:
    assert detach(SECOND, site.agent, FAST).done
    assert not site.serve(), "it is detached"
    assert attach(SECOND, site.agent, FAST).done


@pytest.mark.parametrize(
    ("change", "gpus"),
    [(rebind, 1), (attach_again, 1), (lambda site: forget_tests(site.host, MACHINE), 2)],
)
def test_after_a_change_the_test_is_due_again(site: Served, change: Callable[[Served], object], gpus: int) -> None:
    assert site.serve_and_work()
    change(site)
    site.agent.reconcile()
    assert (site.state(), site.tested) == (UNTESTED, ("Unknown", "NotTested"))
    assert site.serve_and_work()
    assert (site.state(), site.tested, site.tests) == (NONE, ("True", "Tested"), 2 + gpus)


def test_a_test_counts_for_one_driver_and_one_machine(site: Served) -> None:
    assert site.serve_and_work()
    (test,) = {(each.machine, each.driver) for each in observe_gpus(site.host).tests.values()}
    assert test == (MACHINE, "550.163.01")
    facts = site.agent.preview()[0]
    for changed in ({"machine": "another"}, {"driver": "560.35.03"}, {"outdated": True}):
        tests = {address: replace(each, **changed) for address, each in facts.gpus.tests.items()}
        other, machines = replace(facts, gpus=replace(facts.gpus, tests=tests)), site.agent.reconcile().machines
        assert set(gpu_recovery.wanted(site.agent.config, other, machines)) == {FIRST, SECOND}, changed
    # What could not be observed is no change.
    site.host.failing["/sys/module/nvidia/version"] = OSError(5, "simulated")
    assert site.state() == NONE
    assert not site.serve()


def test_a_gpu_that_was_not_tested_is_tried_again_and_more_and_more_rarely(site: Served) -> None:
    """A pod has it. The other one is tested nevertheless, and only once."""
    site.end, site.message = GpuTestEnd.NOT_RUN, "the claim a/b has it"
    waits = []
    assert site.serve_and_work()
    assert (site.state(FIRST), site.state()) == (NONE, UNTESTED)
    assert site.said(ConditionType.GPUS_TESTED)[1:] == (
        "NotTested",
        f"not tested yet: {SECOND}: machine says: the claim a/b has it",
    )
    for _ in range(5):
        waited = 0.0
        while not site.serve_and_work():
            assert site.stopped == (f"{SECOND}: its test waits: machine says: the claim a/b has it",)
            site.later(30)
            waited += 30
        waits.append(waited)
    assert waits == [AGAIN, 2 * AGAIN, 4 * AGAIN, 8 * AGAIN, LATEST]
    assert site.tests == 7
    site.end = GpuTestEnd.PASSED
    site.later(LATEST)
    assert site.serve_and_work()
    assert (site.state(), site.tested) == (NONE, ("True", "Tested"))
    site.serve()
    assert site.stopped == ()


@pytest.mark.parametrize("end", [GpuTestEnd.FAILED, GpuTestEnd.HUNG])
def test_a_gpu_that_has_failed_is_not_tested_again_by_itself(site: Served, end: GpuTestEnd) -> None:
    site.end = end
    assert site.serve_and_work()
    status, reason, message = site.said(ConditionType.GPUS_TESTED)
    assert (status, reason) == ("False", "TestFailed")
    assert f"run `unbounded-agent gpus reset {SECOND}`, then `unbounded-agent gpus test {SECOND}`" in message
    assert site.state() == ("TestFailed", Effect.NO_SCHEDULE)
    site.later(86400)
    assert not site.serve()
    # Somebody has repaired it.
    site.end = GpuTestEnd.PASSED
    attach(SECOND, site.agent, FAST)
    assert site.state() == UNTESTED
    assert site.serve_and_work()
    assert site.state() == NONE


def test_a_gpu_with_another_error_is_not_tested(site: Served) -> None:
    site.asks_for_reset()
    site.later(1)
    assert site.serve_and_work()
    assert (site.tests, site.tested) == (1, ("False", "NotTested"))
    site.later(86400)
    assert not site.serve()


def test_a_machine_that_is_not_ready_is_not_asked(site: Served) -> None:
    site.failing = {ConditionType.CDI_SPEC_CURRENT: "SpecRefused"}
    site.answer()
    assert not site.serve()
    site.failing = {}
    site.answer()
    assert site.serve()


def test_a_machine_that_its_test_makes_unready_is_not_tested_in_a_loop(site: Served) -> None:
    site.end = GpuTestEnd.NOT_RUN
    assert site.serve_and_work()
    for _ in range(3):
        for failing in ({ConditionType.CDI_SPEC_CURRENT: "SpecRefused"}, {}):
            site.failing = failing
            site.answer()
            assert not site.serve()


def test_the_unit_is_not_started_while_it_runs(site: Served) -> None:
    for state in ("activating", "deactivating"):
        site.host.bus.unit(UNIT, state)
        assert not site.serve()
        assert not observe_gpus(site.host).begun
    site.host.bus.unit(UNIT, "failed")
    assert site.serve()


def test_a_unit_that_cannot_be_started_is_not_started_in_each_pass(site: Served) -> None:
    del site.host.bus.units[UNIT]
    site.host.bus.unit(UNIT, "inactive", "not-found")

    def refuse(*call: object) -> tuple[object, ...]:
        if str(call[2]).endswith("StartUnit"):
            raise BusAnswerError("simulated")
        return site.host.bus(*call)  # type: ignore[arg-type]

    site.host.bus_caller = refuse
    with pytest.raises(BusAnswerError):
        site.serve()
    assert not site.serve()
    site.later(AGAIN)
    with pytest.raises(BusAnswerError):
        site.serve()


def test_a_test_that_was_killed_goes_on(site: Served) -> None:
    """The machine has not answered; the taint of the test stays, and then that of a GPU without a test."""

    def kill() -> None:
        raise Interrupted

    assert site.serve()
    site.meanwhile = [kill]
    with pytest.raises(Interrupted):
        work(site.agent, FAST)
    assert site.state()[1] is Effect.NO_SCHEDULE
    assert not site.serve()
    site.later(AGAIN)
    assert site.serve_and_work()
    assert (site.state(), site.tested) == (NONE, ("True", "Tested"))


# The reset.


@pytest.mark.parametrize(
    ("policy", "own_word", "verdict", "begins"),
    [
        ({}, True, Verdict.NEEDS_RESET, False),
        (RESET, True, Verdict.NEEDS_RESET, True),
        (RESET, False, Verdict.NEEDS_RESET, False),
        (RESET, True, Verdict.NEEDS_REBOOT, False),
        (RESET, True, Verdict.BROKEN, False),
    ],
)
def test_a_gpu_is_reset_only_if_asked_for_by_both(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    policy: dict[str, object],
    own_word: bool,
    verdict: Verdict,
    begins: bool,
) -> None:
    """By the configuration, and by the GPU itself: not by the meaning that NVIDIA's catalogue gives to an error."""
    site = made(tmp_path, clock, monkeypatch, gate=False, recovery=policy)
    at = time.time()
    assert record_fault(site.host, SECOND, GpuFault("Xid1", "simulated", at, verdict, at, own_word=own_word))
    assert site.serve() is begins
    if not own_word:
        # The driver asks for it after the error that it has found first: that one stays, with its meaning.
        site.asks_for_reset()
        assert observe_gpus(site.host).faults[SECOND].reason == "Xid1"
        assert site.serve()


def test_a_gpu_is_reset_and_given_back(resetting: Served, smi: Smi) -> None:
    site = resetting
    site.asks_for_reset(source=THE_GPU)
    assert site.serve_and_work()
    assert f"--gpu-reset -i {SECOND}" in smi.calls
    assert nothing_left(site)
    assert (site.granted(), site.state(), smi.persistent[SECOND]) == ((FIRST, SECOND), NONE, True)
    site.later(86400)
    assert not site.serve()


def test_what_a_test_found_does_not_make_the_service_reset_again_and_again(resetting: Served, smi: Smi) -> None:
    """Without the gate, no test follows that could end it."""
    site, at = resetting, time.time()
    found = GpuFault("TestFailed", "simulated", at, Verdict.NEEDS_RESET, at, GPU_TEST)
    assert record_fault(site.host, SECOND, found)
    assert not site.serve()
    site.asks_for_reset()
    assert site.serve_and_work()
    site.later(86400)
    assert not site.serve()
    assert observe_gpus(site.host).faults[SECOND].source == GPU_TEST
    assert sum("--gpu-reset" in call for call in smi.calls) == 1


def test_a_reset_that_the_driver_no_longer_asks_for_is_not_made_for_a_test(resetting: Served, smi: Smi) -> None:
    """What the test has found stays: a person decides."""
    site = resetting
    site.asks_for_reset()
    at = time.time()
    assert record_fault(site.host, SECOND, GpuFault("TestFailed", "simulated", at, Verdict.NEEDS_RESET, at, GPU_TEST))
    assert site.serve()
    assert record_recovered(site.host, SECOND)
    site.later(LATEST)
    assert not site.serve()
    assert observe_gpus(site.host).faults[SECOND].source == GPU_TEST
    assert site.state() == ("TestFailed", Effect.NO_SCHEDULE)


def test_what_a_test_found_outlasts_a_worse_error_that_the_driver_withdraws(resetting: Served) -> None:
    """Whichever came first. It was forgotten together with the worse one."""
    site, at = resetting, time.time()
    found = GpuFault("TestFailed", "simulated", at, Verdict.NEEDS_RESET, at, GPU_TEST)
    reboot = GpuFault("Xid95", "simulated", at, Verdict.NEEDS_REBOOT, at)
    for first, second in ((found, reboot), (reboot, found)):
        assert record_fault(site.host, SECOND, first)
        assert record_fault(site.host, SECOND, second)
        assert observe_gpus(site.host).faults[SECOND].verdict is Verdict.NEEDS_REBOOT
        assert record_recovered(site.host, SECOND)
        site.agent.reconcile()
        assert site.state() == ("TestFailed", Effect.NO_SCHEDULE)
        run_tests([SECOND], 0.0, False, site.agent, FAST)
        assert site.state() == NONE


def test_a_test_that_passes_ends_no_error_but_a_tests(resetting: Served) -> None:
    site, at = resetting, time.time()
    for each in (
        GpuFault("Xid48", "x", at, Verdict.NEEDS_RESET, at),
        GpuFault("TestFailed", "x", at, Verdict.NEEDS_RESET, at, GPU_TEST),
    ):
        assert record_fault(site.host, SECOND, each)
    run_tests([SECOND], 0.0, False, site.agent, FAST)
    assert site.state() == ("Xid48", Effect.NO_SCHEDULE)


def test_a_gpu_is_tested_after_its_reset(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pod gets it in between."""
    site = made(tmp_path, clock, monkeypatch, recovery=RESET)
    smi, states = Smi(site), list[tuple[str, Effect]]()
    assert site.serve_and_work()
    site.asks_for_reset()
    assert site.serve()
    before, site.meanwhile = site.tests, [lambda: states.append(site.state())] * 20
    work(site.agent, FAST)
    assert any("--gpu-reset" in call for call in smi.calls)
    assert states
    assert {effect for _, effect in states} == {Effect.NO_SCHEDULE}
    assert (site.tests, site.state(), site.tested) == (before + 1, NONE, ("True", "Tested"))


@pytest.mark.parametrize("allocation", ["dra", "device-plugin"])
def test_pods_keep_a_gpu_that_is_to_be_reset(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, allocation: str
) -> None:
    """It is withheld from new pods, nobody is evicted, and what it waits for is said."""
    site = made(tmp_path, clock, monkeypatch, gate=False, recovery=RESET, allocation=allocation)
    smi = Smi(site)
    directory = site.hold(group=POD_GROUP, command=b"train")
    site.asks_for_reset()
    assert site.serve_and_work()
    assert smi.calls == []
    if allocation == "dra":
        assert site.state() == ("Xid154", Effect.NO_SCHEDULE)
    status, reason, message = site.said(ConditionType.GPUS_HEALTHY)
    assert (status, reason) == ("False", "GPUNeedsReset")
    assert f"the reset of {SECOND} waits: in use by PID {HOLDER} (train)" in message
    assert site.granted() == (FIRST, SECOND), "its pods' containers can restart"
    assert not site.serve()
    assert f"PID {HOLDER} (train)" in site.stopped[0]
    shutil.rmtree(directory)
    site.later(AGAIN)
    assert site.serve_and_work()
    assert (site.granted(), nothing_left(site)) == ((FIRST, SECOND), True)
    assert len(resets(site)) == 1, "to wait is no attempt"


def test_a_gpu_that_is_opened_meanwhile_again_and_again_is_tried_more_and_more_rarely(
    resetting: Served, smi: Smi
) -> None:
    site, directories = resetting, list[Path]()
    site.asks_for_reset()
    times = 0
    for _ in range(20):
        site.meanwhile = [lambda: directories.append(site.hold(group=POD_GROUP, command=b"train"))]
        times += site.serve_and_work()
        shutil.rmtree(directories.pop(), ignore_errors=True) if directories else None
        site.later(AGAIN / 2)
    assert 2 <= times <= 5
    assert "was opened in the meantime" in site.said(ConditionType.GPUS_HEALTHY)[2]
    assert (site.granted(), smi.calls) == ((FIRST, SECOND), [])


def resets(site: Served) -> list[float]:
    found: dict[str, list[float]] = json.loads(site.host.read(GPU_RESETS))
    return found[SECOND]


def test_attempts_are_limited_over_restarts_and_reboots(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = made(tmp_path, clock, monkeypatch, gate=False, recovery={**RESET, "attempts": 2, "hours": 5})
    smi = Smi(site)
    smi.refusal = IN_USE
    site.asks_for_reset()
    for _ in range(40):
        site.serve_and_work()
        site.later(LATEST / 2)
    assert sum("--gpu-reset" in call for call in smi.calls) == 2
    message = site.said(ConditionType.GPUS_HEALTHY)[2]
    assert f"the reset of {SECOND} waits: its 2 automatic resets within 5 h did not help" in message
    assert f"run `unbounded-agent gpus reset {SECOND}`" in message
    # The GPU is back, fails again, and the host was rebooted meanwhile.
    attach(SECOND, site.agent, FAST)
    smi.refusal = ""
    for name in site.host.entries(RUNTIME):
        if name.endswith(".json"):
            site.host.remove(f"{RUNTIME}/{name}")
    site.asks_for_reset()
    assert not site.serve()
    site.later(5 * 3600)
    assert site.serve_and_work()
    assert site.state() == NONE
    assert sum("--gpu-reset" in call for call in smi.calls) == 3


def test_a_gpu_whose_attempts_are_spent_is_not_taken_because_another_ones_turn_has_come(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = made(tmp_path, clock, monkeypatch, gate=False, recovery={**RESET, "attempts": 1})
    smi = Smi(site)
    site.asks_for_reset()
    assert site.serve_and_work()
    site.later(60)
    site.asks_for_reset()
    assert not site.serve()
    site.asks_for_reset(FIRST)
    assert site.serve_and_work()
    assert [call for call in smi.calls if "--gpu-reset" in call] == [
        f"--gpu-reset -i {each}" for each in (SECOND, FIRST)
    ]
    assert SECOND not in observe_gpus(site.host).tainted
    assert site.granted() == (FIRST, SECOND), "its pods' containers can restart"


def test_linked_gpus_are_reset_together_if_all_of_them_ask_for_it(resetting: Served, smi: Smi) -> None:
    """Nothing but the tool's refusal tells which GPUs are linked. It is no attempt."""
    site, smi.linked = resetting, True
    site.asks_for_reset(FIRST)
    site.asks_for_reset()
    assert site.serve_and_work()
    assert smi.calls.count(f"--gpu-reset -i {FIRST},{SECOND}") == 1
    assert (nothing_left(site), site.granted(), len(resets(site))) == (True, (FIRST, SECOND), 1)


def test_who_has_to_act_is_said_of_a_gpu_whose_linked_ones_need_no_reset(resetting: Served, smi: Smi) -> None:
    """For as long as that is so, whatever the number of attempts; then the service goes on by itself."""
    site, smi.linked = resetting, True
    site.asks_for_reset()
    for _ in range(10):
        site.serve_and_work()
        site.later(LATEST)
    assert f"run `unbounded-agent gpus reset {FIRST} {SECOND}`" in site.said(ConditionType.GPUS_HEALTHY)[2]
    assert (FIRST in site.granted(), FIRST in observe_gpus(site.host).tainted) == (True, False)
    assert not any(each for each in smi.calls if f"-i {FIRST}" in each), "nobody has asked for that"
    site.asks_for_reset(FIRST)
    assert site.serve_and_work()
    assert (nothing_left(site), site.granted()) == (True, (FIRST, SECOND))


def test_a_reset_that_has_begun_ends_although_the_policy_is_switched_off(resetting: Served, smi: Smi) -> None:
    """Otherwise nothing would give the GPU back."""
    site = resetting
    site.asks_for_reset()
    assert site.serve()
    smi.after = lambda call: interrupt() if "--gpu-reset" in smi.calls[-1] else None
    with pytest.raises(Interrupted):
        work(site.agent, FAST)
    smi.after, Served.recovery = lambda call: None, {}
    site.configure()
    site.later(AGAIN)
    assert site.serve_and_work()
    assert (nothing_left(site), site.granted()) == (True, (FIRST, SECOND))
    site.asks_for_reset()
    assert not site.serve()


def test_only_what_the_service_has_begun_is_reset(resetting: Served, smi: Smi) -> None:
    """Otherwise nothing would go on with it if it failed."""
    site = resetting
    site.asks_for_reset(FIRST)
    assert site.serve()
    site.asks_for_reset()
    smi.refusal = f"{LINKED}0\n"
    work(site.agent, FAST)
    assert set(observe_gpus(site.host).resetting) == {FIRST}
    smi.refusal = ""
    assert site.serve()
    work(site.agent, FAST)
    site.later(AGAIN)
    site.serve_and_work()
    assert nothing_left(site)


def test_without_the_record_of_attempts_there_is_none(resetting: Served, smi: Smi) -> None:
    site = resetting
    site.asks_for_reset()
    site.host.write(GPU_RESETS, b"{")
    assert not site.serve()
    assert "gpu-resets.json" in observe_gpus(site.host).begun[SECOND].why
    assert smi.calls == []
    site.host.write(GPU_RESETS, b"{}")
    site.later(AGAIN)
    site.host.full.append(GPU_RESETS)
    assert site.serve()
    with pytest.raises(OSError, match="No space left"):
        work(site.agent, FAST)
    assert not any("--gpu-reset" in call for call in smi.calls)


def test_what_a_person_detaches_or_resets_is_left_alone(resetting: Served, smi: Smi) -> None:
    site = resetting
    (smi.descriptors / "2").unlink()
    assert detach(SECOND, site.agent, FAST).done
    site.asks_for_reset()
    assert not site.serve()
    attach(SECOND, site.agent, FAST)
    site.later(1)
    site.asks_for_reset()
    assert site.serve(), "it is given back"
    attach(SECOND, site.agent, FAST)
    work(site.agent, FAST)
    assert smi.calls == []
    assert not site.serve()
    assert not observe_gpus(site.host).begun


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("killed", range(1, 6))
def test_a_reset_that_was_killed_goes_on_by_itself(resetting: Served, smi: Smi, killed: int, after: bool) -> None:
    """At each call of nvidia-smi."""
    site = resetting

    def kill(call: int) -> None:
        if call == killed:
            raise Interrupted

    setattr(smi, "after" if after else "before", kill)
    site.asks_for_reset()
    assert site.serve()
    with pytest.raises(Interrupted):
        work(site.agent, FAST)
    site.agent.reconcile()
    assert (site.granted(), site.permitted()) == ((FIRST,), False)
    smi.after = smi.before = lambda call: None
    assert not site.serve()
    site.later(AGAIN)
    assert site.serve_and_work()
    assert (site.granted(), site.state(), smi.persistent[SECOND]) == ((FIRST, SECOND), NONE, True)


def test_a_test_by_hand_does_not_end_a_reset_that_was_killed(resetting: Served, smi: Smi) -> None:
    """Before the GPU was taken from its machine."""
    site = resetting
    site.asks_for_reset()
    assert site.serve()
    site.meanwhile = [interrupt]
    with pytest.raises(Interrupted):
        work(site.agent, FAST)
    assert SECOND in observe_gpus(site.host).resetting
    run_tests([SECOND], 0.0, False, site.agent, FAST)
    site.later(AGAIN)
    assert site.serve_and_work()
    assert (nothing_left(site), site.state()) == (True, NONE)


def interrupt() -> None:
    raise Interrupted


class Mortal:
    """Is killed before a write of the records of GPUs, in which all steps are; from then on, it writes nothing."""

    def __init__(self, site: Served, killed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes, self.killed, self.write, self.remove = 0, killed, site.host.write, site.host.remove
        monkeypatch.setattr(site.host, "write", self.do_write)
        monkeypatch.setattr(site.host, "remove", self.do_remove)

    def do_write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        self.writes += path in (GPUS, GPU_RESETS)
        self.live()
        self.write(path, content, mode)

    def do_remove(self, path: str) -> None:
        self.live()
        self.remove(path)

    def live(self) -> None:
        if self.writes >= self.killed:
            raise Interrupted


def test_killed_at_each_write_the_gpu_is_withheld_and_comes_back(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service, the reset, the test."""
    killed, ended = 0, False
    while not ended:
        killed += 1
        site = made(tmp_path / str(killed), clock, monkeypatch, recovery=RESET)
        smi = Smi(site)
        assert site.serve_and_work(), (killed, site.said(ConditionType.READY))
        site.asks_for_reset()
        with monkeypatch.context() as life:
            Mortal(site, killed, life)
            try:
                site.serve_and_work()
                ended = True
            except Interrupted:
                pass
        site.agent.reconcile()
        assert ended or SECOND not in site.granted() or site.state()[1] is Effect.NO_SCHEDULE, killed
        for _ in range(3):
            site.later(LATEST)
            site.serve_and_work()
        assert nothing_left(site), killed
        assert (site.state(), site.granted(), smi.persistent[SECOND]) == (NONE, (FIRST, SECOND), True), killed
        assert site.tested == ("True", "Tested")
    assert killed > 10


def nothing_left(site: Served) -> bool:
    notes = observe_gpus(site.host)
    return not any((notes.faults, notes.tainted, notes.resetting, notes.begun))


@pytest.mark.parametrize("end", [GpuTestEnd.PASSED, GpuTestEnd.FAILED])
def test_a_reset_by_hand_is_followed_by_a_test(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Capture, end: GpuTestEnd
) -> None:
    """What an earlier test has found counts until then."""
    site = made(tmp_path, clock, monkeypatch)
    Smi(site)
    site.end = GpuTestEnd.HUNG
    assert site.serve_and_work()
    site.end, before = end, site.tests
    assert command(site.agent, f"gpus reset {SECOND} --dry-run") == 0
    assert f"would run `unbounded-agent gpus test {SECOND}`" in capsys.readouterr().out
    assert command(site.agent, f"gpus reset {SECOND}") == (end is not GpuTestEnd.PASSED)
    shown = capsys.readouterr().out
    assert f"{SECOND} was reset, works, and was given back to {MACHINE}\n{SECOND} {end}" in shown
    assert site.tests == before + 1
    assert site.state() == (NONE if end is GpuTestEnd.PASSED else ("TestFailed", Effect.NO_SCHEDULE))
