"""The machine's report: what the machine half writes is accepted, anything else is refused with the key's name."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.host.observe.machine import parse_report
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.errors import DocumentError
from agent.model.handoff import (
    CHANGED_FILES_LIMIT,
    SIZE_LIMIT,
    FabricAnswer,
    Publication,
    Repair,
    Report,
    render_report,
)

LINKED = Condition(ConditionType.LIBRARIES_LINKED, Status.TRUE, "Linked", "25 libraries are linked")


def document(**changes: Any) -> bytes:  # noqa: ANN401
    whole = json.loads(
        render_report(Report("0123456789abcdef", (LINKED,), ("0", "GPU-x"), "b-1", "0.1.0", {"spec": 2}))
    )
    return json.dumps({**whole, **changes}).encode()


def condition(**changes: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    return [{"type": "LibrariesLinked", "status": "True", "reason": "Linked", "message": "x", **changes}]


def test_a_report_of_the_machine_half_is_read_back() -> None:
    report = parse_report(document())
    assert report.generation == "0123456789abcdef"
    assert report.conditions == (LINKED,)
    assert report.repairs == {**dict.fromkeys(Repair, 0), Repair.SPEC: 2}
    assert report.advertised_gpus is None
    assert report.publication is None
    assert report.fabric == (), "asked, but no GPU answered"
    assert not report.unknown_conditions
    paths = tuple(f"/etc/{number}" for number in range(CHANGED_FILES_LIMIT + 1))
    fabric = (FabricAnswer("0000:1b:00.0", "In Progress", "N/A"), FabricAnswer("0000:43:00.0", "", ""))
    answered = Publication(2**64 - 1, 1_700_000_000_000_000_001)
    whole = Report("", (LINKED,), (), "", "", {}, 0, changed_files=paths, fabric=fabric, publication=answered)
    report = parse_report(render_report(whole))
    assert report.advertised_gpus == 0, "none is known, and not the same as an unknown number"
    assert report.changed_files == paths[:-1]
    assert (report.fabric, report.publication) == (fabric, answered)
    assert parse_report(document(fabric=[{**ANSWER, "new": 1}])).fabric is not None


ANSWER = {"gpu": "0000:1b:00.0", "state": "Completed", "status": "Success"}


@pytest.mark.parametrize(
    "wrong",
    [
        [{**ANSWER, "gpu": "0000:1b:00.0; run `evil`"}],
        [{**ANSWER, "gpu": ""}],
        [{**ANSWER, "state": "x" * 65}],
        [{**ANSWER, "status": "\x1b[2J"}],
        [{**ANSWER, "state": 3}],
        *([{**ANSWER, "state": word}] for word in ("In Progress; run it", "`reboot`", "rm -r", "/etc/passwd", "N/A\n")),
        *([ANSWER, ANSWER], [ANSWER] * 1025, {"0000:1b:00.0": "Completed"}, "Completed"),
    ],
)
def test_attack_answers_about_the_fabric_cannot_read_like_a_command_and_are_bounded(wrong: object) -> None:
    with pytest.raises(DocumentError, match="fabric"):
        parse_report(document(fabric=wrong))


@pytest.mark.parametrize(
    "wrong", [[1], [1, 2, 3], [1, 2**64], [-1, 2], [1, "2"], [1, True], [1, 2.0], {"inode": 1, "mtime_ns": 2}, "12"]
)
def test_the_numbers_of_a_publication_are_bounded(wrong: object) -> None:
    with pytest.raises(DocumentError, match="publication"):
        parse_report(document(publication=wrong))


@pytest.mark.parametrize(
    "path", ["/etc/x; run `curl evil`", "etc/x", "/etc/\x1b[2J", "/etc/\u00e9", "/etc/x\n", "/" + "x" * 255, "/", 7]
)
def test_attack_a_changed_file_cannot_read_like_a_command(path: object) -> None:
    with pytest.raises(DocumentError, match="changed_files"):
        parse_report(document(changed_files=[path]))


def test_conditions_keys_and_repairs_of_a_newer_machine_half_are_left_out() -> None:
    """They made the report unusable: all conditions of the machine were Unknown, BadReport, and so was Ready."""
    assert parse_report(document(extra={"deep": [1, "\x1b"]})) == parse_report(document())
    other = condition(type="FoundByANewerRelease", status="False", reason="Failed", since=1)
    newer = [*condition(reason="NewReason"), *other]
    report = parse_report(document(conditions=newer, repairs={**dict.fromkeys(Repair, 0), "spec": 1, "another": True}))
    assert [(each.type, each.reason) for each in report.conditions] == [(ConditionType.LIBRARIES_LINKED, "NewReason")]
    assert report.unknown_conditions == ("FoundByANewerRelease=False (Failed)",)
    assert report.repairs == {**dict.fromkeys(Repair, 0), Repair.SPEC: 1}


def test_a_report_of_another_version_says_what_to_do() -> None:
    """The message promised that the machine half would write the report again, which does not help."""
    with pytest.raises(DocumentError, match="upgrade the agent on the host"):
        parse_report(document(version=2, conditions={"of": "another form"}))


def test_a_programs_error_output_in_a_message_does_not_damage_the_report() -> None:
    message = "nvidia-ctk: \x1b[31mfailed\nat \udc80" + "x" * 3000
    report = parse_report(
        render_report(Report("", (Condition(LINKED.type, Status.FALSE, "Failed", message),), (), "", "", {}))
    )
    assert report.conditions[0].message.startswith("nvidia-ctk: \\x1b[31mfailed at \\udc80x")


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (b"", "not JSON"),
        (b"[]", "the document must be an object, not a list"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "the document must be an object"),
        (document(extra="?").replace(b"?", b"\xff"), "not JSON"),
        (document(extra="\udc80"), "not JSON"),
        (document(extra=float("nan")), "not JSON"),
        (document(extra=0).replace(b'"extra": 0', b'"extra": ' + b"[" * 100_000), "not JSON"),
        (document(version=2), "version 2 is unknown (this release knows 1)"),
        (document(version="1"), "key version must be a whole number, not a string"),
        (document(version=True), "key version must be a whole number, not a boolean"),
        (document(version=1.0), "key version must be a whole number, not a number"),
        (document(generation="../../etc"), "key generation must be a string matching regex"),
        (document(generation="a\n"), "key generation"),
        (document(generation="a" * 65), "key generation"),
        (document(conditions={}), "key conditions must be a list, not an object"),
        (document(conditions=condition() * 2), "key conditions: a type appears twice"),
        (document(conditions=[{}]), "key conditions[0].type is missing"),
        (document(conditions=condition() * 100), "key conditions must be a list of length <= 64"),
        (document(conditions=condition(type="Ready\n")), "key conditions[0].type must be a string matching regex"),
        (document(conditions=condition(type="x" * 65)), "key conditions[0].type must be a string matching regex"),
        (document(conditions=condition(type="New") * 2), "key conditions: a type appears twice"),
        (document(conditions=condition(status="Maybe")), "key conditions[0].status: unknown value 'Maybe'"),
        (document(conditions=condition(status=True)), "key conditions[0].status must be a string, not a boolean"),
        (document(conditions=condition(reason="two words")), "key conditions[0].reason"),
        (document(conditions=condition(reason="Linked\n")), "key conditions[0].reason"),
        (document(conditions=condition(reason="x" * 65)), "key conditions[0].reason"),
        (document(conditions=condition(reason="")), "key conditions[0].reason"),
        (document(conditions=condition(message="\x1b[2J")), "key conditions[0].message has unprintable characters"),
        (document(conditions=condition(message="\u202e")), "key conditions[0].message has unprintable characters"),
        (document(conditions=condition(message="x" * 2001)), "key conditions[0].message must be a string of length <="),
        (document(changed_files=["/a", "/a"]), "key changed_files: a path appears twice"),
        (document(changed_files=["/a\n"]), "key changed_files[0] has a path that may not be listed: '/a\\n'"),
        (document(changed_files=[f"/{each}" for each in range(CHANGED_FILES_LIMIT + 1)]), "key changed_files must be"),
        (document(agent_version=1), "key agent_version must be a string, not a whole number"),
        (document(agent_version="x" * 65), "key agent_version"),
        (document(agent_version="\x7f"), "key agent_version has unprintable characters"),
        (document(advertised_gpus=True), "key advertised_gpus must be a whole number or null, not a boolean"),
        (document(advertised_gpus=2**31), "key advertised_gpus"),
        (document(repairs=[]), "key repairs must be an object, not a list"),
        (document(repairs=None), "key repairs must be an object, not null"),
        (document(repairs={"spec": -1}), "key repairs.spec must be a whole number >= 0"),
        (document(repairs={"spec": 2**31}), "key repairs.spec"),
        (document(repairs={"spec": True}), "key repairs.spec must be a whole number, not a boolean"),
        (document(repairs={"spec": None}), "key repairs.spec must be a whole number, not null"),
        (b" " * (SIZE_LIMIT + 1), "larger than"),
    ],
)
def test_anything_else_is_refused_by_name(data: bytes, key: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_report(data)
    assert str(caught.value).startswith(f"report.json: {key}")
    assert str(caught.value).isprintable()
    assert str(caught.value).isascii()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("repairs", "{" + '"":-1,' * 140_000 + '"spec": -1}'),
        ("repairs", json.dumps({f"{number:x}": "" for number in range(70_000)} | {"spec": -1})),
        ("repairs", json.dumps({"\x1b" * 170_000: 1, "spec": -1})),
        ("conditions", json.dumps([{f"{number:x}": 1 for number in range(90_000)}])),
        ("conditions", json.dumps(condition(type="x" * 1_000_000))),
        ("conditions", json.dumps(condition() * 10_000)),
        ("changed_files", "[" + '"/a",' * 200_000 + '"/a"]'),
        ("publication", "[" + "1" * 1_000_000 + ", 1]"),
    ],
    ids=[
        *("one key", "many keys", "a long key", "a condition", "a long word", "many conditions"),
        *("many paths", "a large number"),
    ],
)
def test_attack_a_report_that_is_all_wrong_costs_little(name: str, wrong: str) -> None:
    """Each wrong key was an error of a kilobyte: at worst 5 s and 450 MB, almost all that the service may have."""
    data = document(**{name: "?"}).replace(b'"?"', wrong.encode())
    assert len(data) <= SIZE_LIMIT
    tracemalloc.start()
    try:
        with pytest.raises(DocumentError, match=f"report.json: key {name}") as caught:
            parse_report(data)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
        assert len(str(caught.value)) < 1000
    finally:
        tracemalloc.stop()


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda each: st.lists(each)), st.text())
def test_a_refusal_never_repeats_control_characters(value: object, key: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_report(json.dumps({"version": 1, "conditions": value, key: value}).encode())
    assert str(caught.value).isprintable()


@given(st.binary())
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with pytest.raises(DocumentError):
        parse_report(data)
