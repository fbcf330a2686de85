"""The machine half asks GPUs for their health: only where that disturbs nothing, and never while a program hangs."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent.host.observe.machine import parse_report
from agent.machine.run import HANDOFF, run
from agent.model.contract import HealthQuestions, render_health_questions
from agent.model.handoff import render_handoff
from agent.model.paths import HEALTH_NAME, MACHINE_HANDOFF_DIRECTORY, PCI_DEVICES
from agent.system.process import Completed, StillRunningError
from agent.vendors.nvidia.contract import HEALTH_FIELDS
from tests.fakes.machine import (
    GPUS,
    REQUEST,
    Answer,
    Machine,
    fabric_rows,
    hang,
    smi_health,
    smi_links,
    stat,
    systemctl,
)

HEALTH = "nvidia-smi of health"
QUESTIONS = f"{MACHINE_HANDOFF_DIRECTORY}/{HEALTH_NAME}"
INTERVAL = 300.0
POD = "0::/kubepods.slice/kubepods-pod0f5ac6c8_8d3b_4f5e_9a1b_111111111111.slice/cri-containerd-{}.scope".format(
    "a" * 64
)
HEALTHY = {
    "persistence_mode": "Enabled",
    "gpu_recovery_action": "None",
    "reset_status.reset_required": "No",
    "reset_status.drain_and_reset_recommended": "No",
    "ecc.errors.uncorrected.volatile.total": "0",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "Not Active",
}


@pytest.fixture
def asked(machine: Machine, later: Callable[[float], None]) -> Machine:
    """A machine that has run, with two GPUs in persistence mode whose health the host asks for."""
    machine.program("nvidia-smi of fabric", fabric_rows(*GPUS, persistence="Enabled"))
    for gpu in GPUS:
        bind(machine, gpu, 1)
    want(machine)
    run(machine)
    machine.program("systemctl", systemctl("active", time.monotonic_ns() // 1000))
    later(60)
    return machine


def want(machine: Machine, *withheld: str, interval: float = INTERVAL) -> None:
    machine.put(QUESTIONS, render_health_questions(HealthQuestions(interval, withheld)))


def bind(machine: Machine, gpu: str, number: int) -> None:
    """Let the kernel bind a driver: sysfs makes a new link."""
    path = machine.tree / f"{PCI_DEVICES}/{gpu}/driver".lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        # The old inode stays in use, or the new link might get its number.
        path.rename(path.with_name(f"old-{number}"))
    path.symlink_to(f"../../../bus/pci/drivers/nvidia-{number}")


def questions(machine: Machine) -> list[str]:
    """Run the machine half, and return how nvidia-smi was called for GPUs' health, without what is always the same."""
    machine.calls.clear()
    run(machine)
    calls = [call for call in machine.calls if any(".pending" in each for each in call)]
    return [" ".join(each for each in call[1:] if each.startswith("--id=")) or "all" for call in calls]


def answers(machine: Machine) -> dict[str, dict[str, Any]]:
    return {each["gpu"]: each for each in machine.report()["health"]}


def silences(machine: Machine) -> list[str]:
    return [each["silence"] for each in machine.report()["health"]]


def test_gpus_are_asked_at_the_interval_and_their_answers_reported_meanwhile(
    asked: Machine, later: Callable[[float], None]
) -> None:
    assert questions(asked) == ["all"]
    first = answers(asked)
    assert [each["said"] for each in first.values()] == [HEALTHY, HEALTHY]
    assert all(each["since"] == each["asked"] and time.time() - each["asked"] < 60 for each in first.values())
    for _ in range(3):
        later(60)
        assert questions(asked) == []
        assert answers(asked) == first
    asked.program(HEALTH, smi_health(*GPUS, failure="Yes"))
    later(120)
    assert questions(asked) == ["all"]
    assert [each["said"]["remapped_rows.failure"] for each in answers(asked).values()] == ["Yes", "Yes"]
    later(INTERVAL)
    since = answers(asked)[GPUS[0]]["since"]
    assert questions(asked) == ["all"]
    run(asked)
    again = answers(asked)[GPUS[0]]
    assert again["since"] == since < again["asked"]
    assert parse_report(json.dumps(asked.report()).encode()).health[0].said["remapped_rows.failure"] == "Yes"


def test_nobody_is_asked_if_the_host_does_not_ask_or_containerd_waits(
    machine: Machine, later: Callable[[float], None]
) -> None:
    machine.program("nvidia-smi of fabric", fabric_rows(*GPUS, persistence="Enabled"))
    assert (questions(machine), machine.report()["health"]) == ([], [])
    want(machine)
    assert questions(machine) == [], "it may be the boot: containerd waits for the end of this run"
    later(60)
    machine.program("systemctl", systemctl("active", 10))
    assert machine.conditions()["RuntimeActive"][1] == "RestartPending"
    assert questions(machine) == [], "containerd waits to be restarted"
    machine.program("systemctl", systemctl("active", time.monotonic_ns() // 1000))
    assert questions(machine) == ["all"]
    machine.drop(QUESTIONS)
    later(INTERVAL)
    assert (questions(machine), machine.report()["health"]) == ([], [])
    for broken in ("{", render_health_questions(HealthQuestions(INTERVAL)).replace(b'"version": 1', b'"version": 9')):
        machine.put(QUESTIONS, broken)
        assert (questions(machine), machine.report()["health"]) == ([], [])


@pytest.mark.parametrize(
    ("withheld", "persistent", "in_pod", "called", "silent"),
    [
        ((), GPUS, (), ["all"], ["", ""]),
        # By an index, nvidia-smi opens only that GPU.
        (GPUS[:1], GPUS, (), ["--id=1"], ["Withheld", ""]),
        (GPUS[1:], GPUS, GPUS, ["--id=0"], ["", "Withheld"]),
        (GPUS, GPUS, GPUS, [], ["Withheld", "Withheld"]),
        ((), GPUS[:1], (), ["--id=0"], ["", "NotInUse"]),
        ((), (), GPUS[1:], ["--id=1"], ["NotInUse", ""]),
        ((), GPUS[:1], GPUS[1:], ["all"], ["", ""]),
        ((), (), (), [], ["NotInUse", "NotInUse"]),
    ],
)
def test_a_gpu_is_asked_only_if_that_disturbs_nothing(
    asked: Machine,
    later: Callable[[float], None],
    withheld: tuple[str, ...],
    persistent: tuple[str, ...],
    in_pod: tuple[str, ...],
    called: list[str],
    silent: list[str],
) -> None:
    """Any other would be initialised for the question; one more holder keeps a GPU from being reset."""
    modes = {gpu: "Enabled" if gpu in persistent else "Disabled" for gpu in GPUS}
    asked.program("nvidia-smi of fabric", "".join(fabric_rows(gpu, persistence=modes[gpu]) for gpu in GPUS))
    # The fabric is asked again when the host publishes the handoff again.
    asked.put(HANDOFF, render_handoff(asked.hand(REQUEST)))
    # A daemon of the machine that has both GPUs open, such as a monitor, is no pod.
    holders = {10: ("0::/system.slice/dcgm.service", GPUS), 11: (POD, in_pod)}
    for pid, (cgroup, gpus) in holders.items():
        asked.process(pid, "x", cgroup=cgroup)
        asked.put(f"/proc/{pid}/comm", "x\n")
        asked.put(f"/proc/{pid}/task/{pid}/maps")
        asked.make_directory(f"/proc/{pid}/task/{pid}/fd")
        for number, gpu in enumerate(gpus):
            asked.link(f"/proc/{pid}/task/{pid}/fd/{number}", f"/dev/nvidia{GPUS.index(gpu)}")
    want(asked, *withheld)
    assert questions(asked) == called
    assert silences(asked) == silent
    assert [bool(each["said"]) for each in answers(asked).values()] == [not each for each in silent]


@pytest.mark.parametrize("missing", [HEALTH_FIELDS[1:2], HEALTH_FIELDS[1:2] + HEALTH_FIELDS[6:], ()])
def test_fields_that_a_driver_lacks_are_not_asked_for(
    asked: Machine, later: Callable[[float], None], missing: tuple[str, ...]
) -> None:
    """One field that nvidia-smi does not know would fail the whole query. It is asked once what it knows."""
    asked.program(HEALTH, smi_health(*GPUS, fields=[each for each in HEALTH_FIELDS if each not in missing]))
    expected = {field: word for field, word in HEALTHY.items() if field not in missing}
    helped = []
    for _ in range(2):
        assert questions(asked) == ["all"]
        helped.append(any("--help-query-gpu" in call for call in asked.calls))
        assert [each["said"] for each in answers(asked).values()] == [expected, expected]
        later(INTERVAL)
    assert helped == [True, False]
    asked.hand(REQUEST._replace(driver_version="580.173.02"))
    questions(asked)
    assert any("--help-query-gpu" in call for call in asked.calls), "another driver root may know more"


def one_fails(argv: tuple[str, ...]) -> Completed:
    if any(each == "--id=0" for each in argv) or "--help-query-gpu" in argv:
        return smi_health(*GPUS)(argv)
    return Completed(15, b"Unable to determine the device handle for GPU1: GPU is lost.\n", b"")


@pytest.mark.parametrize(
    ("program", "said", "silent"),
    [
        (smi_health(*GPUS, gpu_recovery_action="[GPU requires reset]"), "GPU requires reset", ""),
        (smi_health(*GPUS, gpu_recovery_action="Drain P2P"), "Drain P2P", ""),
        (smi_health(*GPUS, gpu_recovery_action="Run `x` (1/2)"), "Run  x   1 2", ""),
        (smi_health(*GPUS, gpu_recovery_action="x" * 99), "x" * 64, ""),
        # No answer is no verdict, and ends none: what was said before counts.
        (smi_health(*GPUS, gpu_recovery_action="[N/A]"), "Reset", "NoAnswer"),
        (smi_health(*GPUS, gpu_recovery_action="[Unknown Error]"), "Reset", "NoAnswer"),
        (smi_health(*GPUS, gpu_recovery_action="ERR!"), "Reset", "NoAnswer"),
        (one_fails, "Reset", "NoAnswer"),
        (hang, "Reset", "NoAnswer"),
        (lambda _: Completed(0, b"0000:02:00.0\n,,,\n\x1b[2J, a\n", b""), "Reset", "NoAnswer"),
    ],
)
def test_words_and_silence(
    asked: Machine, later: Callable[[float], None], program: Answer, said: str, silent: str
) -> None:
    asked.program(HEALTH, smi_health(*GPUS, gpu_recovery_action="Reset"))
    questions(asked)
    before = answers(asked)[GPUS[1]]["asked"]
    asked.program(HEALTH, program)
    later(INTERVAL)
    questions(asked)
    run(asked)
    found = answers(asked)[GPUS[1]]
    assert found["silence"] == silent
    assert found["asked"] > before or silent, "it answered"
    assert found["asked"] == before or not silent, "the time is that of the answer"
    assert found["said"].get("gpu_recovery_action") == said
    assert parse_report(json.dumps(asked.report()).encode()).health, "the host accepts every word"


def test_another_binding_of_the_driver_ends_what_was_said(asked: Machine, later: Callable[[float], None]) -> None:
    questions(asked)
    assert len(answers(asked)) == 2
    bind(asked, GPUS[0], 2)
    run(asked)
    assert list(answers(asked)) == [GPUS[1]]
    later(INTERVAL)
    assert questions(asked) == ["all"]
    assert len(answers(asked)) == 2


@pytest.fixture
def unkillable(asked: Machine) -> Iterator[Callable[[], list[str]]]:
    """A query that waits in the kernel as process 4711; the fixture returns which programs were started for health."""

    def answer(argv: tuple[str, ...]) -> Completed:
        if "--help-query-gpu" in argv:
            return smi_health(*GPUS)(argv)
        asked.put("/proc/4711/stat", stat(4711, 99))
        raise StillRunningError("no answer within 5 s", 4711)

    asked.program(HEALTH, answer)
    yield lambda: questions(asked)
    with contextlib.suppress(FileNotFoundError):
        asked.drop("/proc/4711/stat")


@pytest.mark.parametrize("ends", ["is gone", "is another process", "is a zombie"])
def test_a_program_that_cannot_be_killed_is_the_last_one(
    asked: Machine, unkillable: Callable[[], list[str]], later: Callable[[float], None], ends: str
) -> None:
    """Each further one would hang too, and keep the driver from being unloaded."""
    want(asked, GPUS[1])
    assert unkillable() == ["--id=0"]
    want(asked)
    for _ in range(3):
        later(INTERVAL)
        assert unkillable() == []
        assert silences(asked) == ["ProgramHangs", "ProgramHangs"]
        assert asked.conditions()["CDISpecCurrent"] == ("True", "Verified")
    asked.program(HEALTH, smi_health(*GPUS))
    if ends == "is gone":
        asked.drop("/proc/4711/stat")
    else:
        text = stat(4711, 100) if ends == "is another process" else stat(4711, 99).replace(" S ", " Z ")
        asked.put("/proc/4711/stat", text)
    later(INTERVAL)
    assert unkillable() == ["all"]
    assert silences(asked) == ["", ""]


def test_a_query_of_each_gpu_stops_at_the_one_that_cannot_be_killed(
    asked: Machine, later: Callable[[float], None]
) -> None:
    def answer(argv: tuple[str, ...]) -> Completed:
        if "--help-query-gpu" in argv:
            return smi_health(*GPUS)(argv)
        if "--id=0" in argv:
            raise StillRunningError("no answer within 5 s", 4711)
        return Completed(15, b"", b"GPU is lost")

    asked.program(HEALTH, answer)
    assert questions(asked) == ["all", "--id=0"]
    assert silences(asked) == ["ProgramHangs", "ProgramHangs"]


def test_a_newer_handoff_does_not_wait_for_the_answers(asked: Machine) -> None:
    """It is settled and reported while nvidia-smi still runs. The answers come with one more report."""
    reported, pause = list[bool](), threading.Event()

    def slow(argv: tuple[str, ...]) -> Completed:
        if "--help-query-gpu" not in argv:
            newer = asked.hand(REQUEST._replace(gpus=GPUS[:1])).generation
            deadline = time.perf_counter() + 60
            while asked.report()["generation"] != newer and time.perf_counter() < deadline:
                pause.wait(0.01)
            reported.append(asked.report()["generation"] == newer)
        return smi_health(*GPUS, failure="Yes")(argv)

    asked.program(HEALTH, slow)
    assert questions(asked) == ["all"]
    assert reported == [True]
    assert {gpu: each["said"]["remapped_rows.failure"] for gpu, each in answers(asked).items()} == {GPUS[0]: "Yes"}


LINKS = "nvidia-smi of links"


def words(machine: Machine) -> list[str | None]:
    """Ask again, and return what is said of each GPU's links."""
    questions(machine)
    return [answers(machine)[gpu]["said"].get("nvlink_errors") for gpu in GPUS]


def test_errors_of_links_count_from_one_question_to_the_next(asked: Machine, later: Callable[[float], None]) -> None:
    """DCGM's classes: recovery and replay errors, and 100 CRC errors in a second."""
    asked.program(LINKS, smi_links(*GPUS, Replay=(9, 0), Recovery=(0, 0), CRC=(5, 1_000_000)))
    assert words(asked) == [None, None], "what was counted before says nothing of now"
    for counted, expected in (
        ({"Replay": (9, 0), "Recovery": (0, 0), "CRC": (2000, 1_000_000)}, ["None", "None"]),
        ({"Replay": (9, 1), "Recovery": (1, 0), "CRC": (2000, 1_000_000)}, ["Recovery", "Replay"]),
        ({"Replay": (10, 1), "Recovery": (2, 0), "CRC": (100_000, 1_000_000)}, ["Recovery", "None"]),
        ({"Replay": (10, 1), "Recovery": (2, 0), "CRC": (140_000, 1_001_000)}, ["CRC", "None"]),
    ):
        later(INTERVAL)
        asked.program(LINKS, smi_links(*GPUS, **counted))
        assert words(asked) == expected
    later(INTERVAL)
    asked.program(LINKS, broken_links)
    assert words(asked) == ["CRC", "None"], "no answer ends nothing"
    later(INTERVAL)
    asked.program(LINKS, smi_links(*GPUS, Replay=(0, 1), Recovery=(0, 0), CRC=(0, 1_001_000)))
    assert words(asked) == ["None", "None"], "reset counters have counted nothing since"
    bind(asked, GPUS[0], 2)
    later(INTERVAL)
    asked.program(LINKS, smi_links(*GPUS, Replay=(7, 1), Recovery=(0, 0), CRC=(0, 1_001_000)))
    assert words(asked) == [None, "None"], "another binding of the driver is another beginning"
    assert silences(asked) == ["", ""]


def broken_links(argv: tuple[str, ...]) -> Completed:
    return Completed(6, b"No devices were found\n", b"") if "nvlink" in argv else smi_links(*GPUS)(argv)


@pytest.mark.parametrize("answer", [broken_links, hang, smi_links(*GPUS), lambda _: Completed(0, b"x, y", b"")])
def test_links_that_are_not_known_say_nothing_and_cost_no_other_answer(asked: Machine, answer: Answer) -> None:
    asked.program(LINKS, answer)
    assert questions(asked) == ["all"]
    assert [each["said"] for each in answers(asked).values()] == [HEALTHY, HEALTHY]
    assert silences(asked) == ["", ""]


@pytest.mark.parametrize("wrong", [broken_links, hang])
def test_a_gpu_that_does_not_tell_of_its_links_silences_no_other(
    asked: Machine, later: Callable[[float], None], wrong: Answer
) -> None:
    def answer(argv: tuple[str, ...]) -> Completed:
        return wrong(argv) if argv[-1] == "0" else smi_links(*GPUS, Replay=(1, count))(argv)

    count = 1
    asked.program(LINKS, answer)
    assert words(asked) == [None, None]
    later(INTERVAL)
    count = 2
    assert words(asked) == [None, "Replay"]


def test_only_a_gpu_that_may_be_asked_is_asked_for_its_links(asked: Machine) -> None:
    want(asked, GPUS[0])
    questions(asked)
    calls = [call[1:] for call in asked.calls if "nvlink" in call or "--query-gpu=pci.bus_id,uuid" in call]
    assert [next(each for each in call if each in ("--id=1", "1")) for call in calls] == ["--id=1", "1"]
