"""`gpus test`: whole passes over a simulated host, and a machine that answers whenever somebody waits for it."""

import json
import math
import os
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent.cli.gpus import list_gpus, run_test
from agent.cli.parser import LONGEST_TEST, make_parser
from agent.host.detach import attach, detach
from agent.host.gpu_tests import parse_results, run_tests
from agent.host.state.gpus import observe_gpus, record_fault, record_recovered, record_tainted, record_testing
from agent.host.verify.gpu_states import health, recovered_at
from agent.machine import gpu_tests
from agent.machine.run import run
from agent.model.contract import (
    TEST_LIMIT,
    Effect,
    GpuTestEnd,
    GpuTestResult,
    GpuTestResults,
    parse_gpu_states,
    parse_test_request,
    render_test_results,
)
from agent.model.errors import AgentError, ConfigError, DocumentError
from agent.model.facts import Facts, GpuFault, Verdict
from agent.model.handoff import HealthAnswer, Report
from agent.model.paths import (
    GPU_TESTS_NAME,
    PCI_DEVICES,
    REMOVED,
    gpu_states_file,
    gpu_test_file,
    handoff_file,
    report_directory,
)
from agent.system.process import Completed
from agent.vendors.nvidia.contract import RECOVERY_ACTION
from tests.fakes.clock import Clock
from tests.fakes.detach_site import FAST, Interrupted, Site
from tests.fakes.gpu_host import MACHINE
from tests.fakes.host import INFORMATION
from tests.fakes.machine import GPUS, gpu_machine

FIRST, SECOND = GPUS
WHOLE = tuple(f"GPU-11111111-2222-3333-4444-55555555555{number}" for number in (0, 1))
REQUEST, RESULTS = gpu_test_file(MACHINE), f"{report_directory(MACHINE)}/{GPU_TESTS_NAME}"
FIGURES = {
    "memory_tested": 78e9,
    "memory_bandwidth": 2.9e12,
    "device_to_host": 52e9,
    "host_to_device": 50e9,
    "seconds": 12.4,
}
NOT_KNOWN = "uncorrected ECC errors not known"
FIGURES_SHOWN = f"78 GB tested, memory 2.9 TB/s, to the host 52 GB/s, from the host 50 GB/s, {NOT_KNOWN} (12 s)"


@pytest.fixture
def site(tmp_path: Path, clock: Clock) -> Site:
    site = Site(tmp_path / "host", clock)
    for number, address in enumerate(GPUS):
        information = INFORMATION.format(minor=number, address=address)
        information = information.replace(f"GPU-00000000-0000-4000-8000-00000000000{number}", WHOLE[number])
        site.host.file(f"/proc/driver/nvidia/gpus/{address}/information", information)
        site.host.symlink(f"/sys/devices/pci0000:00/{address}/driver", "../../../bus/pci/drivers/nvidia")
    site.configure(allocation="dra")
    site.start()
    return site


def result(
    gpu: str = SECOND,
    end: GpuTestEnd = GpuTestEnd.PASSED,
    uuid: str | None = None,
    **facts: Any,  # noqa: ANN401
) -> GpuTestResult:
    uuid = WHOLE[GPUS.index(gpu)] if uuid is None and gpu in GPUS else uuid or ""
    return GpuTestResult(gpu, uuid, end, **{"figures": FIGURES, "finished": 1e9, **facts})


def says(site: Site, *results: GpuTestResult, done: bool = True, request: str = "") -> Callable[[], None]:
    """Return a step in which the machine writes these results."""

    def say() -> None:
        asked = request or parse_test_request(site.host.read(REQUEST)).id
        site.host.write(RESULTS, render_test_results(GpuTestResults(asked, done, results)))

    return say


def ends(site: Site, *words: str, force: bool = False) -> list[tuple[str, GpuTestEnd]]:
    return [(each.gpu.pci_address, each.end) for each in run_tests(words, 5.0, force, site.agent, FAST)]


def command(site: Site, *words: str, **options: object) -> int:
    chosen = {"addresses": words, "seconds": 5.0, "force": False, "json": False, **options}
    return run_test(Namespace(**chosen), site.agent)


def facts(site: Site) -> Facts:
    return site.agent.preview()[0]


def judged(site: Site, address: str = SECOND) -> tuple[Verdict, str, str]:
    gpu = next(gpu for vendor in facts(site).vendors for gpu in vendor.gpus if gpu.pci_address == address)
    found = health(gpu, facts(site))
    return found.verdict, found.reason, found.source


def state(site: Site, address: str = SECOND) -> tuple[str, Effect]:
    found = parse_gpu_states(site.host.read(gpu_states_file(MACHINE)))[address]
    return found.reason, found.effect


def test_the_way_to_the_machine_and_back(
    site: Site, tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, states = gpu_machine(tmp_path / "in-machine"), list[tuple[str, Effect]]()
    run(machine)
    reports = {WHOLE[0]: {"result": "passed", "figures": FIGURES}, WHOLE[1]: {"result": "failed", "step": "memory"}}
    machine.program("gpu_test", lambda argv: Completed(0, json.dumps(reports[argv[4]]).encode(), b""))
    machine.make_directory("/proc")
    for name, text in (("speed", "16.0 GT/s PCIe\n"), ("width", "8\n")):
        site.host.file(f"/sys/devices/pci0000:00/{FIRST}/current_link_{name}", text)
        site.host.file(f"/sys/devices/pci0000:00/{SECOND}/current_link_{name}", "Unknown\n")
    handoff = site.host.read(handoff_file(MACHINE))

    def answer() -> None:
        states.append(state(site))
        # The same file: the directory is bound into the machine.
        os.link(site.host.full_path(REQUEST), machine.full_path(gpu_tests.REQUEST))
        assert site.host.is_locked(REQUEST), "if this process is killed, the test ends"
        assert gpu_tests.run(machine) == 0
        site.host.write(RESULTS, machine.read(gpu_tests.RESULTS))

    # The first wait is until no new pod gets the GPUs.
    site.meanwhile = [lambda: states.append(state(site)), answer]
    assert command(site) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{FIRST} passed: {FIGURES_SHOWN.replace(NOT_KNOWN, 'no new uncorrected ECC error')}",
        f"{FIRST} has no other GPU of its model to compare with in this test",
        f"{SECOND} failed: step memory",
    ]
    assert states == [("Testing", Effect.NO_SCHEDULE)] * 2
    assert [call[5:] for call in machine.calls if call[-1] == "8" or WHOLE[1] in call] == [
        ("--seconds", "5.0", "--link-speed", "16.0", "--link-width", "8"),
        ("--seconds", "5.0"),
    ]
    assert not site.host.exists(REQUEST)
    assert (state(site, FIRST), state(site)) == (("", Effect.NONE), ("TestFailed", Effect.NO_SCHEDULE))
    assert site.host.read(handoff_file(MACHINE)) == handoff, "no new generation"
    list_gpus(Namespace(json=True), site.agent)
    shown = json.loads(capsys.readouterr().out)["gpus"]
    assert [each["test"] for each in shown] == ["passed", "failed"]
    assert all(each["testedAt"] for each in shown)
    site.meanwhile = [lambda: None, says(site, result())]
    assert command(site, SECOND, json=True) == 0
    (shown,) = json.loads(capsys.readouterr().out)["gpus"]
    assert (shown["result"], shown["alone"], shown["results"][0]["figures"]) == ("passed", True, FIGURES)
    assert state(site) == ("", Effect.NONE)


HUNG, FAILED = GpuTestEnd.HUNG, GpuTestEnd.FAILED
RESET = (Verdict.NEEDS_RESET, "TestFailed", "gpus test")


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (result(end=FAILED, step="memory"), RESET),
        (result(end=FAILED, step="memory errors"), RESET),
        (result(end=HUNG), RESET),
        (result(end=FAILED, slow=("memory_bandwidth",)), (Verdict.DEGRADED, "TestSlow", "gpus test")),
        (result(end=GpuTestEnd.NOT_RUN), (Verdict.HEALTHY, "", "")),
        (result(), (Verdict.HEALTHY, "", "")),
    ],
)
def test_a_verdict_of_a_test_lasts_until_a_test_passes_or_somebody_attaches_the_gpu(
    site: Site, clock: Clock, found: GpuTestResult, verdict: tuple[Verdict, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.meanwhile = [lambda: None, says(site, found)]
    assert ends(site, SECOND) == [(SECOND, found.result)]
    assert judged(site) == verdict
    # Neither the GPU's own word ends it, nor time.
    (gpu,) = (each for vendor in facts(site).vendors for each in vendor.gpus if each.pci_address == SECOND)
    answer = HealthAnswer(SECOND, {RECOVERY_ACTION: "None"}, 1e9, 2.0**35)
    (machine,) = facts(site).machines
    report = Report("", (), health=(answer,))
    assert not recovered_at(gpu, replace(facts(site), machines=(replace(machine, report=report),)))
    assert not record_recovered(site.host, SECOND, math.inf), "nor does the driver's, in the kernel log"
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 3600.0)
    assert judged(site) == verdict
    if verdict[0] is not Verdict.HEALTHY:
        for end in (lambda: ends(site, SECOND), lambda: attach(SECOND, site.agent, FAST)):
            site.meanwhile = [lambda: None, says(site, result())]
            end()
            assert judged(site)[0] is Verdict.HEALTHY
            site.meanwhile = [lambda: None, says(site, found)]
            ends(site, SECOND)
            assert judged(site) == verdict


PEERS = (Verdict.NEEDS_RESET, "PeerTestFailed", "gpus test")


def pair(end: GpuTestEnd, **facts: Any) -> tuple[GpuTestResult, GpuTestResult]:  # noqa: ANN401
    """Return what a machine says of the way between the GPUs: once for each."""
    known = {"figures": {"peer_to": 4e10, "seconds": 1}, **facts}
    return result(FIRST, end, peer=SECOND, **known), result(SECOND, end, peer=FIRST, **known)


def test_a_wrong_result_of_a_pair_is_the_verdict_of_both(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    both = result(FIRST), result(SECOND)
    found = pair(FAILED, step="peer access", message="wrong words: 1")
    site.meanwhile = [lambda: None, says(site, *both, done=False), says(site, *both, *found)]
    assert command(site) == 1
    shown = f"{FIRST} with {SECOND} failed: step peer access; machine says: wrong words: 1; to it 40 GB/s (1 s)"
    assert shown in capsys.readouterr().out
    assert (judged(site, FIRST), judged(site)) == (PEERS, PEERS)
    (gpu,) = (gpu for vendor in facts(site).vendors for gpu in vendor.gpus if gpu.pci_address == SECOND)
    assert f"`unbounded-agent gpus test {SECOND} {FIRST}`" in health(gpu, facts(site)).message
    # A test of one GPU alone says nothing about the way.
    site.meanwhile = [lambda: None, says(site, result())]
    ends(site, SECOND)
    assert judged(site) == PEERS
    site.meanwhile = [lambda: None, says(site, *both, *pair(GpuTestEnd.PASSED))]
    assert ends(site) == [(FIRST, GpuTestEnd.PASSED), (SECOND, GpuTestEnd.PASSED)]
    assert (judged(site, FIRST)[0], judged(site)[0]) == (Verdict.HEALTHY, Verdict.HEALTHY)


def test_gpus_that_cannot_reach_each_other_are_no_fault(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    found = pair(GpuTestEnd.NOT_RUN, step="peer access", message="x cannot reach the memory of y")
    site.meanwhile = [lambda: None, says(site, result(FIRST), result(SECOND), *found)]
    assert command(site) == 0
    assert f"{SECOND} with {FIRST} not-run: step peer access; machine says: x cannot" in capsys.readouterr().out
    assert (judged(site, FIRST)[0], judged(site)[0]) == (Verdict.HEALTHY, Verdict.HEALTHY)


def test_a_test_that_passes_ends_no_other_error(site: Site) -> None:
    assert record_fault(site.host, SECOND, GpuFault("Xid48", "simulated", 1e9, Verdict.NEEDS_RESET, 1e9))
    site.meanwhile = [lambda: None, says(site, result())]
    assert ends(site, SECOND) == [(SECOND, GpuTestEnd.PASSED)]
    assert judged(site) == (Verdict.NEEDS_RESET, "Xid48", "kernel log")


@pytest.mark.parametrize("error", [Interrupted(), AgentError("simulated")])
def test_what_interrupts_the_command_gives_the_gpus_back(site: Site, error: BaseException) -> None:
    """And what was found until then counts."""

    def interrupt() -> None:
        raise error

    failed = says(site, result(FIRST, FAILED), done=False)
    site.meanwhile = [lambda: None, failed, interrupt]
    with pytest.raises(type(error)):
        ends(site)
    assert not site.host.exists(REQUEST)
    assert observe_gpus(site.host).tainted == {}
    assert (judged(site, FIRST)[0], judged(site)[0]) == (Verdict.NEEDS_RESET, Verdict.HEALTHY)
    assert state(site) == ("", Effect.NONE)


def test_the_next_test_ends_the_taint_of_one_that_was_killed(site: Site) -> None:
    assert record_testing(site.host, SECOND, testing=True)
    site.meanwhile = [lambda: None, says(site, result())]
    ends(site, SECOND)
    assert observe_gpus(site.host).tainted == {}
    assert record_testing(site.host, SECOND, testing=True)
    site.host.write(REQUEST, b"{}")
    attach(SECOND, site.agent, FAST)
    assert observe_gpus(site.host).tainted == {}
    assert not site.host.exists(REQUEST), "the machine would go on with the test"


def test_the_taint_of_a_detach_stays(site: Site) -> None:
    assert record_tainted(site.host, SECOND, evict=False)
    site.meanwhile = [lambda: None, says(site, result())]
    assert ends(site, SECOND) == [(SECOND, GpuTestEnd.PASSED)]
    assert SECOND in observe_gpus(site.host).tainted
    assert state(site) == ("Detaching", Effect.NO_SCHEDULE)


def test_what_is_not_tested(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert detach(FIRST, site.agent, FAST).done
    site.meanwhile = [lambda: None, says(site, result())]
    assert command(site, FIRST, SECOND) == 3
    assert f"{FIRST} not-run: it is detached\n" in capsys.readouterr().out
    site.host.rebind(SECOND, "")
    assert command(site, SECOND) == 3
    assert "it has no kernel driver" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no GPU has this PCI address"):
        ends(site, "0000:09:00.0")
    for unit in ("inactive", "failed"):
        site.host.rebind(SECOND, "nvidia")
        site.host.bus.unit(f"systemd-nspawn@{MACHINE}.service", unit, stopped_at=1)
        assert command(site, SECOND) == 3
        assert f"{SECOND} not-run: no running machine has it" in capsys.readouterr().out
    assert command(site) == 3
    assert capsys.readouterr().out == "no running machine has a GPU\n"
    assert not site.host.exists(REQUEST)


def writes(content: bytes) -> Callable[[Site], Callable[[], None]]:
    return lambda site: lambda: site.host.write(RESULTS, content)


@pytest.mark.parametrize(
    ("step", "seconds", "why"),
    [
        (lambda site: lambda: None, 60, "has not answered for 60 s; see"),
        (writes(b"{"), 60, "has not answered for 60 s: gpu-tests.json: not JSON"),
        # It has begun, and then hangs.
        (lambda site: says(site, done=False), 215, "has not answered for 215 s; see"),
        # Of a GPU that it was not asked about; of another request.
        (lambda site: says(site, result(FIRST, FAILED), done=False), 215, "has not answered for 215 s; see"),
        (lambda site: says(site, result(end=FAILED), request="ab"), 60, "has not answered for 60 s; see"),
        (lambda site: says(site, result(FIRST, FAILED)), 0, f"machine {MACHINE} did not test it"),
    ],
)
def test_silence_says_nothing_about_a_gpu(
    site: Site, clock: Clock, step: Callable[[Site], Callable[[], None]], seconds: float, why: str
) -> None:
    site.meanwhile = [step(site)]
    site.meanwhile.insert(0, lambda: None)
    clock.least, clock.slept = 1.0, []
    (tried,) = run_tests([SECOND], 5.0, False, site.agent, FAST)
    assert tried.end is GpuTestEnd.NOT_RUN
    assert why in tried.results[0].message
    assert seconds - 1 <= sum(clock.slept) - 5 <= seconds + 10
    assert (judged(site, FIRST)[0], judged(site)[0]) == (Verdict.HEALTHY, Verdict.HEALTHY)
    assert observe_gpus(site.host).tests == {}


def test_a_request_that_a_machine_misses_is_written_again(site: Site, clock: Clock) -> None:
    """systemd does not watch the file while the service ends, which an earlier test has started."""
    missed = list[int | None]()

    def misses_the_first() -> None:
        missed.append(site.host.link_inode(REQUEST))
        if missed[-1] == missed[0]:
            site.meanwhile.insert(0, misses_the_first)
        else:
            says(site, result())()

    site.meanwhile = [lambda: None, misses_the_first]
    clock.least = 1.0
    assert ends(site, SECOND) == [(SECOND, GpuTestEnd.PASSED)]
    assert clock.passed < 20


def test_a_machine_that_blocks_its_own_request_is_not_tested(site: Site) -> None:
    """And nothing else happens: other machines' GPUs are tested all the same."""
    site.host.file(f"{REQUEST}/planted")
    site.host.remove_tree(REMOVED)
    site.host.file(REMOVED)
    (tried,) = run_tests([SECOND], 5.0, False, site.agent, FAST)
    assert tried.end is GpuTestEnd.NOT_RUN
    assert f"cannot update {REQUEST}" in tried.results[0].message
    assert state(site)[1] is Effect.NONE


def test_a_gpu_of_which_not_all_parts_were_tested_has_not_passed(site: Site) -> None:
    """The machine's service was killed after the first MIG device, and says that all is done."""
    parts = [result(uuid=f"MIG-{number}") for number in (1, 2)]
    site.meanwhile = [lambda: None, says(site, parts[0], done=False), says(site)]
    assert ends(site, SECOND) == [(SECOND, GpuTestEnd.NOT_RUN)]
    site.meanwhile = [lambda: None, says(site, *parts)]
    assert ends(site, SECOND) == [(SECOND, GpuTestEnd.PASSED)]


def test_gpus_are_compared_with_their_equals(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    slower = {**FIGURES, "memory_bandwidth": 2.6e12, "host_to_device": 45.1e9}
    site.meanwhile = [lambda: None, says(site, result(FIRST), result(figures=slower))]
    assert command(site) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        f"{SECOND} is slower than its equals: memory 2.6 TB/s, and the best of its model 2.9 TB/s",
    ]


def changed(**keys: object) -> bytes:
    document = json.loads(render_test_results(GpuTestResults("ab", True, (result(),))))
    own = {key: value for key, value in keys.items() if key in document}
    each = {**document["results"][0], **{key: value for key, value in keys.items() if key not in own}}
    return json.dumps({**document, "results": [each], **own}).encode()


@pytest.mark.parametrize(
    "keys",
    [
        {"version": 2},
        {"id": "x\n"},
        {"done": 1},
        {"gpu": "../../x"},
        {"uuid": "$(x)"},
        {"uuid": "a" * 99},
        {"result": "fine"},
        {"step": "Run `x`"},
        {"message": "x" * 1001},
        {"figures": {"x y": 1.0}},
        {"figures": {"x": -1.0}},
        {"figures": {"x": 1e300}},
        {"figures": {f"x{'y' * number}": 1.0 for number in range(31)} | {"a": 1, "b": 2}},
        {"floors": {"x": None}},
        {"slow": ["x" * 40]},
        {"finished": 1e99},
        {"peer": "$(x)"},
        {"results": [{}]},
        {"results": [json.loads(changed())["results"][0]] * 257},
    ],
)
def test_results_are_bounded(keys: dict[str, object]) -> None:
    assert parse_results(changed()).results == (result(),)
    with pytest.raises(DocumentError, match=r"^gpu-tests\.json"):
        parse_results(changed(**keys))


def test_what_a_machine_says_is_one_line_that_names_it() -> None:
    (found,) = parse_results(changed(message="a\x1b[2J\nb\u202e")).results
    assert found.message == r"machine says: a\x1b[2J b\u202e"


def test_a_second_test_or_a_detach_of_the_same_gpu_is_refused(site: Site) -> None:
    def second() -> None:
        for work in (lambda: ends(site, SECOND), lambda: detach(SECOND, site.agent, FAST)):
            with pytest.raises(AgentError, match=f"or `gpus test` of {SECOND} is still running"):
                work()
        says(site, result())()

    site.meanwhile = [lambda: None, second]
    assert ends(site, SECOND) == [(SECOND, GpuTestEnd.PASSED)]


def test_two_tests_do_not_replace_each_others_requests(site: Site) -> None:
    def second() -> None:
        with pytest.raises(AgentError, match="another `gpus test` is still running"):
            ends(site, FIRST)
        says(site, result())()

    site.meanwhile = [lambda: None, second]
    assert ends(site, SECOND) == [(SECOND, GpuTestEnd.PASSED)]


def test_seconds_are_limited(capsys: pytest.CaptureFixture[str]) -> None:
    assert LONGEST_TEST == TEST_LIMIT
    parser = make_parser("gpus")
    assert parser.parse_args(["gpus", "test", "--seconds", "3600"]).seconds == TEST_LIMIT
    for wrong in ("3601", "-1", "nan", "x"):
        with pytest.raises(SystemExit):
            parser.parse_args(["gpus", "test", "--seconds", wrong])
    assert PCI_DEVICES not in capsys.readouterr().out


def test_an_earlier_error_does_not_hide_that_a_test_failed(site: Site) -> None:
    """The GPU's own word could end the earlier one, and with it what the test found."""
    assert record_fault(site.host, SECOND, GpuFault("Xid48", "simulated", 1e9, Verdict.NEEDS_RESET, 1e9))
    site.meanwhile = [lambda: None, says(site, result(end=FAILED))]
    ends(site, SECOND)
    assert judged(site) == RESET


def test_a_machine_that_names_ever_more_devices_is_not_waited_for(site: Site) -> None:
    many = [result(uuid=f"MIG-{number}") for number in range(20)]
    site.meanwhile = [lambda: None, says(site, *many, done=False)]
    (tried,) = run_tests([SECOND], 5.0, False, site.agent, FAST)
    assert tried.end is GpuTestEnd.NOT_RUN
    assert f"machine {MACHINE} names more devices than its GPUs can have" in tried.results[0].message


def test_a_machine_that_goes_on_and_on_keeps_the_gpus_of_others_only_for_a_time(site: Site, clock: Clock) -> None:
    """It says something new often enough to be waited for, and the test holds the GPUs of all machines."""
    clock.least = 100.0
    said = [result(uuid=f"MIG-{number}") for number in range(8)]
    site.meanwhile = [lambda: None, *(says(site, *said[: number // 2], done=False) for number in range(16))]
    (tried,) = run_tests([SECOND], 0.0, False, site.agent, FAST)
    assert tried.end is GpuTestEnd.NOT_RUN
    assert f"machine {MACHINE} has not finished within" in tried.results[-1].message
    assert clock.passed < 900


def test_slow_under_force_is_no_verdict(site: Site) -> None:
    """A pod may have used the GPU meanwhile."""
    site.meanwhile = [lambda: None, says(site, result(end=FAILED, slow=("memory_bandwidth",)))]
    assert ends(site, SECOND, force=True) == [(SECOND, FAILED)]
    assert judged(site)[0] is Verdict.HEALTHY
