"""Tests of GPUs that the host asks for, with a scripted program in place of the one that computes."""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from agent.machine import gpu_tests
from agent.machine.run import HANDOFF, run
from agent.model.contract import GpuTestRequest, GpuToTest, render_test_request
from agent.model.handoff import Handoff, Report, render_handoff, render_report
from agent.model.paths import DRA_CLAIMS, spec_file
from agent.system.process import Completed, StillRunningError, host_runner
from agent.vendors.nvidia.contract import UNCORRECTED, UNCORRECTED_EVER
from tests.fakes.machine import GPUS, REQUEST, Answer, Machine, hang, smi_health
from tests.fakes.mig import CAPS, MIG_REQUEST, UUIDS, mig_spec

WHOLE = tuple(f"GPU-11111111-2222-3333-4444-55555555555{number}" for number in (0, 1))
POD = "0f5ac6c8-8d3b-4f5e-9a1b-111111111111"
POD_GROUP = f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{'a' * 64}.scope"
CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
LINKED = (GpuToTest(GPUS[0], 16.0, 8), GpuToTest(GPUS[1]))
PASSED: dict[str, object] = {"result": "passed", "step": None, "message": None, "figures": {"seconds": 1.5}, "slow": []}


def program(status: int = 0, **report: object) -> Answer:
    return lambda argv: Completed(status, json.dumps({**PASSED, **report}).encode() + b"\n", b"")


@pytest.fixture
def ready(machine: Machine) -> Machine:
    """A machine with a published specification for two GPUs that nobody uses."""
    run(machine)
    machine.program("gpu_test", program())
    machine.make_directory("/proc")
    machine.calls.clear()
    return machine


def ask(machine: Machine, gpus: Sequence[GpuToTest] = LINKED, request: str = "ab", force: bool = False) -> None:
    machine.put(gpu_tests.REQUEST, render_test_request(GpuTestRequest(request, 5.0, tuple(gpus), force)))


def computed(machine: Machine) -> list[tuple[str, ...]]:
    """Return the arguments of the programs that computed."""
    return [call[4:] for call in machine.calls if "gpu_test" in " ".join(call)]


def results(machine: Machine) -> Any:  # noqa: ANN401
    return json.loads(machine.read(gpu_tests.RESULTS))


def ends(machine: Machine, *gpus: GpuToTest, force: bool = False) -> list[tuple[str, str]]:
    """Test GPUs, and return the results, each with its message."""
    ask(machine, gpus or LINKED, force=force)
    assert gpu_tests.run(machine) == 0
    found = results(machine)
    assert (found["id"], found["done"]) == ("ab", True)
    return [(each["result"], each["message"]) for each in found["results"]]


def test_gpus_are_tested_one_after_the_other_and_each_result_is_written(ready: Machine) -> None:
    before: list[tuple[bool, list[str]]] = []

    def look(argv: tuple[str, ...]) -> Completed:
        before.append((results(ready)["done"], [each["uuid"] for each in results(ready)["results"]]))
        return program(floors={"memory_bandwidth": None, "device_to_host": 3})(argv)

    ready.program("gpu_test", look)
    assert ends(ready) == [("passed", "")] * 4
    assert before == [(False, []), (False, [WHOLE[0]]), (False, [*WHOLE])]
    assert computed(ready) == [
        (WHOLE[0], "--seconds", "5.0", "--link-speed", "16.0", "--link-width", "8"),
        (WHOLE[1], "--seconds", "5.0"),
        (WHOLE[0], "--peer", WHOLE[1]),
    ]
    first = results(ready)["results"][0]
    figures = {"seconds": 1.5, "uncorrected_errors": 0}
    assert (first["gpu"], first["figures"], first["floors"]) == (GPUS[0], figures, {"device_to_host": 3})


def test_the_result_of_a_pair_is_that_of_both(ready: Machine) -> None:
    def fails(argv: tuple[str, ...]) -> Completed:
        found = {"result": "failed", "step": "peer access", "message": "wrong words: 1"}
        return (
            program(1, **found, figures={"peer_to": 1, "peer_from": 2})(argv) if "--peer" in argv else program()(argv)
        )

    ready.program("gpu_test", fails)
    assert ends(ready)[2:] == [("failed", "wrong words: 1")] * 2
    pair = [(each["gpu"], each["uuid"], each["peer"], each["figures"]) for each in results(ready)["results"][2:]]
    assert pair == [
        (GPUS[0], WHOLE[0], GPUS[1], {"peer_to": 1, "peer_from": 2}),
        (GPUS[1], WHOLE[1], GPUS[0], {"peer_to": 2, "peer_from": 1}),
    ]


def test_only_gpus_that_have_passed_and_that_no_pod_has_are_tested_in_pairs(ready: Machine) -> None:
    ready.program("gpu_test", lambda argv: program(1, result="failed")(argv) if WHOLE[1] in argv else program()(argv))
    assert len(ends(ready)) == 2
    ready.drop(gpu_tests.RESULTS)

    def taken(argv: tuple[str, ...]) -> Completed:
        if WHOLE[1] in argv:
            given({"-1": [WHOLE[0]]})(ready)
        return program()(argv)

    ready.program("gpu_test", taken)
    ready.calls.clear()
    found = ends(ready)
    assert [result for result, _ in found] == ["passed", "passed", "not-run", "not-run"]
    assert found[3][1].startswith(f"the kubelet gave it to pod {POD}")
    assert len(computed(ready)) == 2


@pytest.mark.parametrize(
    ("count", "pairs"), [(0, ""), (1, ""), (2, "01"), (3, "01 12 20"), (8, "01 12 23 34 45 56 67 70")]
)
def test_a_ring_tries_each_gpu_twice(count: int, pairs: str) -> None:
    gpus = [GpuToTest(f"0000:0{number}:00.0") for number in range(count)]
    assert gpu_tests.ring(gpus) == [(gpus[int(each[0])], gpus[int(each[1])]) for each in pairs.split()]


def counts(*values: str, fields: tuple[str, ...] = (UNCORRECTED, UNCORRECTED_EVER)) -> Answer:
    """Answer as a GPU whose counters have these values, one after the other."""
    left = [*values]

    def answer(argv: tuple[str, ...]) -> Completed:
        total = left[0] if "--help-query-gpu" in argv or len(left) == 1 else left.pop(0)
        return smi_health(*GPUS, fields=fields, total=total)(argv)

    return answer


@pytest.mark.parametrize(
    ("answer", "end", "errors"),
    [
        (counts("7", "7"), "passed", 0),
        (counts("7", "9"), "failed", 2),
        # The driver has begun to count again.
        (counts("7", "0"), "passed", 0),
        (counts("7", "9", fields=(UNCORRECTED,)), "failed", 2),
        # Nothing is known: no ECC, no such field, no answer.
        (counts("[N/A]", "[N/A]"), "passed", None),
        (counts("[Unknown Error]", "3"), "passed", None),
        (counts("7", "9", fields=()), "passed", None),
        (lambda _: Completed(9, b"", b"no driver"), "passed", None),
    ],
)
def test_ecc_errors_during_a_test(ready: Machine, answer: Answer, end: str, errors: int | None) -> None:
    ready.program("nvidia-smi of health", answer)
    ((result, message),) = ends(ready, LINKED[0])
    (found,) = results(ready)["results"]
    assert (result, found["figures"].get("uncorrected_errors")) == (end, errors)
    if end == "failed":
        assert (found["step"], message) == ("memory errors", "the GPU counted 2 more uncorrected ECC errors")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_question_that_cannot_be_killed_is_the_last_program(ready: Machine, when: str) -> None:
    """Otherwise the next GPU's test could wait for the same lock of the driver, and count as hung."""
    answer = smi_health(*GPUS, fields=(UNCORRECTED,))

    def asked(argv: tuple[str, ...]) -> Completed:
        if "--help-query-gpu" in argv or (when == "after" and not computed(ready)):
            return answer(argv)
        raise StillRunningError("no answer within 5 s", 4711)

    ready.program("nvidia-smi of health", asked)
    first, second = ends(ready)
    assert first[0] == ("not-run" if when == "before" else "passed")
    assert second == ("not-run", f"the test of {GPUS[0]} waits in the kernel, and cannot be killed")
    assert len(computed(ready)) == (0 if when == "before" else 1)


def test_ecc_errors_do_not_hide_what_a_test_found(ready: Machine) -> None:
    ready.program("nvidia-smi of health", counts("7", "9"))
    ready.program("gpu_test", program(1, result="failed", step="memory", message="wrong words: 3"))
    assert ends(ready, LINKED[0]) == [("failed", "wrong words: 3")]


def test_each_mig_device_is_tested(ready: Machine) -> None:
    """The link and its floor are the whole GPU's."""
    assert CAPS
    ready.put(HANDOFF, render_handoff(Handoff("kube1", "x86_64", (MIG_REQUEST,))))
    ready.put(spec_file("nvidia"), json.dumps(mig_spec()))
    names = tuple(each["name"] for each in mig_spec()["devices"])
    ready.put("/run/unbounded-agent/report/report.json", render_report(Report("", (), names)))
    assert ends(ready, LINKED[0]) == [("passed", "")] * 3
    assert computed(ready) == [(each, "--seconds", "5.0") for each in UUIDS]


Change = Callable[[Machine], object]


def given(*ids: object, resource: str = "gpu", deleted: bool = False) -> Change:
    """The kubelet gave a pod these devices."""

    def change(machine: Machine) -> None:
        entry = {"PodUID": POD, "ContainerName": "x", "ResourceName": f"nvidia.com/{resource}", "DeviceIDs": ids[0]}
        machine.put(CHECKPOINT, json.dumps({"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": {}}}))
        machine.make_directory(f"/var/lib/kubelet/pods/{'another' if deleted else POD}")

    return change


def claimed(admin: bool = False) -> Change:
    device = {"device": "gpu-1", "cdi_names": [f"nvidia.com/gpu={WHOLE[0]}"], "admin": admin}
    claims = [{"namespace": "default", "name": "train", "uid": "1", "devices": [device]}]
    return lambda machine: machine.put(DRA_CLAIMS, json.dumps({"version": 1, "digest": "", "claims": claims}))


def opened(command: str, cgroup: str = POD_GROUP) -> Change:
    def change(machine: Machine) -> None:
        machine.process(10, "x", cgroup=cgroup)
        machine.put("/proc/10/comm", f"{command}\n")
        machine.put("/proc/10/task/10/maps")
        machine.make_directory("/proc/10/task/10/fd")
        machine.link("/proc/10/task/10/fd/3", "/dev/nvidia0")

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (given({"-1": [WHOLE[0]]}), f"the kubelet gave it to pod {POD}"),
        (given({"0": [WHOLE[1]], "1": [WHOLE[0]]}), f"the kubelet gave it to pod {POD}"),
        # Kubernetes before 1.21; a GPU that several containers share; an id of an unknown form.
        (given([WHOLE[0]]), f"the kubelet gave it to pod {POD}"),
        (given({"-1": [f"{WHOLE[0]}::3"]}, resource="gpu.shared"), f"the kubelet gave it to pod {POD}"),
        (given({"-1": ["nvidia0"]}), f"the kubelet gave it to pod {POD}"),
        (given({"-1": [WHOLE[1]]}), ""),
        (given({"-1": ["nic0"]}, resource="hostdev0"), ""),
        # The kubelet keeps it listed until it admits another pod.
        (given({"-1": [WHOLE[0]]}, deleted=True), ""),
        (given(None), ""),
        (lambda machine: machine.put(CHECKPOINT, "{"), "cannot tell whether it may be tested"),
        (lambda machine: machine.put(DRA_CLAIMS, "{}"), "cannot tell whether it may be tested"),
        (claimed(), "the claim default/train has it"),
        (claimed(admin=True), ""),
        (opened("python3"), f"a pod has it open: PID 10 (python3), pod {POD}"),
        # They have all GPUs open, whoever uses them.
        (opened("nvidia-device-p"), ""),
        (opened("dcgm-exporter"), ""),
        (opened("python3", "0::/system.slice/x.service"), ""),
    ],
)
def test_a_gpu_that_a_pod_has_is_tested_only_by_force(ready: Machine, change: Change, why: str) -> None:
    change(ready)
    result, message = ends(ready, LINKED[0])[0]
    assert result == ("not-run" if why else "passed"), message
    assert message.startswith(why)
    assert len(computed(ready)) == (0 if why else 1)
    ready.drop(gpu_tests.RESULTS)
    assert ends(ready, LINKED[0], force=True) == [("passed", "")]


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (program(1, result="failed", step="memory", message="wrong words: 3"), ("failed", "wrong words: 3")),
        (program(2, result="not run", message="no libcuda"), ("not-run", "no libcuda")),
        # It did not end in time, so the GPU stopped it.
        (hang, ("hung", "stopped after its time limit of 125 s")),
        # The program failed, which says nothing about the GPU.
        (lambda _: Completed(-11, b"", b""), ("not-run", "killed by signal 11")),
        (lambda _: Completed(1, b"", b"Traceback"), ("not-run", "exit code 1")),
        (program(0, result="fine"), ("not-run", "KeyError: 'fine'")),
    ],
)
def test_how_a_test_ends(ready: Machine, answer: Answer, end: tuple[str, str]) -> None:
    ready.program("gpu_test", answer)
    assert ends(ready, LINKED[0]) == [end]


def test_a_program_that_cannot_be_killed_is_the_last_one(ready: Machine) -> None:
    def unkillable(argv: tuple[str, ...]) -> Completed:
        raise StillRunningError("no answer within 128 s", 4711)

    ready.program("gpu_test", unkillable)
    first, second = ends(ready)
    assert first[0] == "hung"
    assert second == ("not-run", f"the test of {GPUS[0]} waits in the kernel, and cannot be killed")
    assert len(computed(ready)) == 1


@pytest.mark.processes
def test_the_program_knows_the_arguments(ready: Machine) -> None:
    """The real one, which here finds no driver, or not this GPU."""
    ready.program("gpu_test", lambda argv: host_runner(argv, 60.0))
    ends(ready, LINKED[0])
    (found,) = results(ready)["results"]
    assert (found["result"], found["step"]) == ("not-run", "driver"), found["message"]


def test_gpus_without_a_test(ready: Machine) -> None:
    assert ends(ready, GpuToTest("0000:09:00.0"))[0][1] == "it is not granted to this machine"
    ready.drop(gpu_tests.RESULTS)
    ready.put(HANDOFF, render_handoff(Handoff("kube1", "x86_64", (REQUEST._replace(vendor="amd"),))))
    assert ends(ready, LINKED[0])[0][1] == "there is no test for this vendor (amd)"


def locked(machine: Machine, until: ExitStack) -> None:
    """Publish a request as releases after 0.1 do; `ask` does as 0.1 does."""
    request = GpuTestRequest("ab", 5.0, LINKED, locked=True)
    machine.stream(gpu_tests.REQUEST, (render_test_request(request),), until=until)


@pytest.mark.parametrize("how", ["another", "removed", "killed"])
def test_a_request_that_the_host_withdraws_ends_the_test_at_once(ready: Machine, how: str) -> None:
    """Whoever interrupts the command wants the GPU back. systemd kills the program, and starts the service again."""
    over, waiting = threading.Event(), ExitStack()

    def wait(argv: tuple[str, ...]) -> Completed:
        match how:
            case "another":
                ask(ready, request="cd")
            case "removed":
                ready.drop(gpu_tests.REQUEST)
            case _:
                waiting.close()
        over.wait(60)
        return program()(argv)

    ready.program("gpu_test", wait)
    locked(ready, waiting)
    assert gpu_tests.run(ready) == 1
    over.set()
    waiting.close()
    assert not results(ready)["done"]


def test_a_test_goes_on_while_the_command_waits(ready: Machine) -> None:
    with ExitStack() as waiting:
        locked(ready, waiting)
        assert gpu_tests.run(ready) == 0
    assert results(ready)["done"]


def test_a_request_is_worked_on_once(ready: Machine) -> None:
    """A service that was killed is started again by systemd, and its test may have been the reason."""
    ask(ready)
    ready.put(gpu_tests.RESULTS, json.dumps({"version": 1, "id": "ab", "done": False, "results": []}))
    assert gpu_tests.run(ready) == 0
    assert (results(ready)["done"], ready.calls) == (True, [])


def test_a_request_that_comes_at_the_end_of_a_test_is_not_missed(ready: Machine) -> None:
    """systemd's path unit does not start the service again for it."""

    def before_write(path: str) -> None:
        if path == gpu_tests.RESULTS and len(computed(ready)) == 1 and ready.exists(path) and results(ready)["results"]:
            ask(ready, LINKED[1:], request="cd")

    ready.before_write = before_write
    ask(ready, LINKED[:1])
    assert gpu_tests.run(ready) == 0
    assert [call[0] for call in computed(ready)] == [*WHOLE]
    assert results(ready)["id"] == "cd"


def test_without_a_request_nothing_is_done(ready: Machine) -> None:
    assert gpu_tests.run(ready) == 0
    ready.put(gpu_tests.REQUEST, "{")
    assert gpu_tests.run(ready) == 0
    assert not ready.exists(gpu_tests.RESULTS)
