"""The machine half asks GPUs for their fabric when something has changed, and never at rest."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from agent.host.observe.machine import parse_report
from agent.machine.notes import LONGEST, Notes
from agent.machine.run import run
from agent.model.paths import FABRIC_NAME, MACHINE_HANDOFF_DIRECTORY
from agent.system.process import Completed
from tests.fakes.machine import GPUS, REQUEST, Machine, fabric_rows, hang

MINUTE = 60.0
QUERY = "nvidia-smi of fabric"


def asked(machine: Machine) -> bool:
    machine.calls.clear()
    run(machine)
    return any("fabric.state" in each for call in machine.calls for each in call)


def publish(machine: Machine, start: int) -> None:
    path = f"{MACHINE_HANDOFF_DIRECTORY}/{FABRIC_NAME}"
    machine.put(path, f"nvidia-fabricmanager.service active, started at {start}")


def answers(machine: Machine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = machine.report()["fabric"]
    return found


def answer(*gpus: str, state: str, status: str, persistence: str = "Disabled") -> list[dict[str, str]]:
    return [{"gpu": gpu, "state": state, "status": status, "persistence": persistence} for gpu in gpus]


@pytest.mark.parametrize(
    ("printed", "status", "found"),
    [
        ("N/A", "N/A", answer(*GPUS, state="N/A", status="N/A")),
        ("[N/A]", "[N/A]", answer(*GPUS, state="[N/A]", status="[N/A]")),
        # What the real nvidia-smi 550.163.01 prints.
        ("state  Completed", "status Success", answer(*GPUS, state="Completed", status="Success")),
        # A driver that does not know the fields.
        ("", "", answer(*GPUS, state="", status="", persistence="")),
    ],
)
def test_settled_gpus_are_asked_once(
    machine: Machine, later: Callable[[float], None], printed: str, status: str, found: list[dict[str, str]]
) -> None:
    """A monitor that opens a GPU each minute keeps it from sleeping, and holds it while it should be unplugged."""
    if printed:
        machine.program(QUERY, fabric_rows(*GPUS, state=printed, status=status))
    else:
        machine.program(QUERY, 'Field "fabric.state" is not a valid field to query.\n', 2)
    runs = []
    for wait in (MINUTE, MINUTE, LONGEST, LONGEST):
        runs.append(asked(machine))
        assert answers(machine) == found
        later(wait)
    assert runs == [True, False, False, False]


@pytest.mark.parametrize(
    ("state", "status", "starts"),
    [
        ("state  In Progress", "status N/A", 0),
        ("Completed", "Insufficient Resources", 0),
        ("Completed", "Success", 1),
        ("In Progress", "N/A", 1),
        # At each start, the waits began again with the shortest one.
        ("In Progress", "N/A", 3),
    ],
)
def test_gpus_are_asked_again_ever_more_rarely(
    machine: Machine,
    later: Callable[[float], None],
    becomes_rare: Callable[..., None],
    state: str,
    status: str,
    starts: int,
) -> None:
    """While they are not registered, or while a Fabric Manager dies again and again: each start opened all GPUs."""
    machine.program(QUERY, fabric_rows(*GPUS, state=state, status=status))
    runs = itertools.count()

    def tries() -> bool:
        if starts and (number := next(runs)) % starts == 0:
            publish(machine, number)
        tried = asked(machine)
        assert len(answers(machine)) == 2, "what they said last is still reported"
        return tried

    becomes_rare(tries)
    machine.program(QUERY, fabric_rows(*GPUS, state="Completed", status="Success"))
    later(LONGEST)
    assert asked(machine), "its last start is not forgotten"
    assert answers(machine) == answer(*GPUS, state="Completed", status="Success")
    later(2 * LONGEST)
    for start in (100, 101):
        assert not asked(machine)
        publish(machine, start)
        assert asked(machine), "after a while without a start, the next one shows at once"
        later(MINUTE)


def test_another_cause_is_a_reason_to_ask(machine: Machine, later: Callable[[float], None]) -> None:
    """The Fabric Manager started later, or started again: registered GPUs may have to be registered again."""
    machine.program(QUERY, fabric_rows(*GPUS, state="Completed", status="Success"))
    publish(machine, 1)
    assert [asked(machine), asked(machine)] == [True, False]
    machine.program(QUERY, fabric_rows(*GPUS, state="In Progress"))
    publish(machine, 2)
    assert asked(machine)
    assert answers(machine) == answer(*GPUS, state="In Progress", status="N/A")
    assert not any("generate" in call for call in machine.calls)
    machine.hand(REQUEST._replace(gpus=GPUS[:1]))
    machine.program(QUERY, fabric_rows(*GPUS))
    assert asked(machine)
    assert answers(machine) == answer(GPUS[0], state="N/A", status="N/A")


@pytest.mark.parametrize(
    ("state", "status"), [("Completed", "Success"), ("Completed", "Insufficient Resources"), ("In Progress", "N/A")]
)
def test_a_handoff_that_is_published_again_is_a_reason_to_ask(machine: Machine, state: str, status: str) -> None:
    """So `gpus attach` says that a GPU was reset. Nothing else says it, and no GPU opens that was not reset."""
    machine.program(QUERY, fabric_rows(*GPUS, state=state, status=status))
    first = machine.hand(REQUEST)
    assert asked(machine)
    assert machine.hand(REQUEST) == first
    machine.program(QUERY, fabric_rows(*GPUS, state="Completed", status="Success"))
    assert [asked(machine), asked(machine)] == [True, False]
    assert answers(machine) == answer(*GPUS, state="Completed", status="Success")


def lost(argv: tuple[str, ...]) -> Completed:
    if argv[1] == "--id=0":
        return Completed(0, fabric_rows(GPUS[0], state="Completed", status="Success").encode(), b"")
    return Completed(15, b"Unable to determine the device handle for GPU1: GPU is lost.\n", b"")


@pytest.mark.parametrize(
    "program",
    [
        lost,
        *(
            fabric_rows(GPUS[0], state="Completed", status="Success") + fabric_rows(GPUS[1], state=state, status=status)
            for state, status in (
                ("[GPU is lost]", "[GPU is lost]"),
                ("ERR!", "ERR!"),
                ("state  ERR!", "status ERR!"),
                ("Completed", "[Unknown Error]"),
                ("Completed", "[N/A]"),
                ("Completed", "ERR!"),
                ("In Progress", "[GPU is lost]"),
                ("A state of a later driver", "Success"),
            )
        ),
    ],
)
def test_a_gpu_that_does_not_answer_says_nothing(machine: Machine, program: Callable[..., Completed] | str) -> None:
    """The others' answers count. No answer is no verdict: the next run asks again."""
    machine.program(QUERY, program)
    assert [asked(machine), asked(machine)] == [True, True]
    assert answers(machine) == answer(GPUS[0], state="Completed", status="Success")


@pytest.mark.parametrize("program", [hang, "", "0000:01:00.0\n,,\n\x1b[2J, a, b\n"])
def test_nonsense_and_silence_are_no_answer(machine: Machine, program: Callable[..., Completed] | str) -> None:
    machine.program(QUERY, program)
    assert asked(machine)
    assert answers(machine) == []
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")


@pytest.mark.parametrize(
    ("status", "reported"),
    [
        ("Won't say (3/4); see `dmesg`", "Won t say  3 4   see  dmesg "),
        ("x" * 5000 + "\x1b[2J", "x" * 64),
    ],
)
def test_the_host_accepts_every_word(machine: Machine, status: str, reported: str) -> None:
    machine.program(QUERY, fabric_rows(*GPUS, state="Completed", status=status))
    run(machine)
    assert answers(machine) == answer(*GPUS, state="Completed", status=reported)
    assert parse_report(json.dumps(machine.report()).encode()).fabric


def test_a_damaged_note_costs_a_question(machine: Machine) -> None:
    """So does one with other keys, of an earlier agent: every run failed at it until the machine's next boot."""
    assert asked(machine)
    given = answer(*GPUS, state="N/A", status="N/A")
    path = next(machine.tree.rglob("fabric-nvidia.json"))
    for damage in (b"{", b"", json.dumps({"note": {}}).encode()):
        path.write_bytes(damage)
        assert (asked(machine), answers(machine)) == (True, given)
    earlier = {"cause": "", "host": ["", ""], "since": 1.0, "until": 1e9, "answers": [[*given[0].values()]]}
    Notes(machine).save("fabric-nvidia", earlier)
    assert [asked(machine), asked(machine)] == [True, False]
    assert answers(machine) == given
