"""The machine's report: what the machine half writes is accepted, anything else is refused with the key's name."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.host.observe.machine_report import parse_report
from agent.model.conditions import Condition, ConditionType, Status
from agent.model.errors import DocumentError
from agent.model.handoff import CHANGED_FILES_LIMIT, SIZE_LIMIT, Publication, render_report

LINKED = Condition(ConditionType.LIBRARIES_LINKED, Status.TRUE, "Linked", "25 libraries are linked")


def document(**changes: Any) -> bytes:  # noqa: ANN401
    whole = json.loads(render_report("0123456789abcdef", (LINKED,), ("0", "GPU-x"), "b-1", "0.1.0", {"spec": 2}))
    return json.dumps({**whole, **changes}).encode()


def condition(**changes: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    return [{"type": "LibrariesLinked", "status": "True", "reason": "Linked", "message": "x", **changes}]


def test_a_report_of_the_machine_half_is_read_back() -> None:
    report = parse_report(document())
    assert report.generation == "0123456789abcdef"
    assert report.conditions == (LINKED,)
    assert report.repairs == {"spec": 2}


def test_an_older_machine_half_counts_nothing() -> None:
    whole = json.loads(document())
    del whole["repairs"]
    assert parse_report(json.dumps(whole).encode()).repairs == {}
    assert parse_report(document()).advertised_gpus is None


def test_advertised_gpus_are_counted() -> None:
    data = render_report("", (LINKED,), (), "", "", {}, 0)
    assert parse_report(data).advertised_gpus == 0, "none is known, and not the same as an unknown number"
    assert "advertised_gpus" not in json.loads(render_report("", (LINKED,), (), "", "", None, 8))


def test_changed_files_are_listed_up_to_a_limit() -> None:
    paths = tuple(f"/etc/{number}" for number in range(CHANGED_FILES_LIMIT + 1))
    data = render_report("", (LINKED,), (), "", "", {}, changed_files=paths)
    assert parse_report(data).changed_files == paths[:-1]
    assert "changed_files" not in json.loads(render_report("", (LINKED,), (), "", "", None, changed_files=paths))
    assert "changed_files" not in json.loads(document()), "an older host half need not know the key"


def test_the_publication_is_read_back_and_its_numbers_are_bounded() -> None:
    answered = Publication(2**64 - 1, 1_700_000_000_000_000_001)
    data = render_report("", (LINKED,), (), "", "", {}, publication=answered)
    assert parse_report(data).publication == answered
    assert "publication" not in json.loads(render_report("", (LINKED,), (), "", "", None, publication=answered))
    assert parse_report(document()).publication is None
    for wrong in ([1], [1, 2, 3], [1, 2**64], [-1, 2], [1, "2"], "12"):
        with pytest.raises(DocumentError, match="publication"):
            parse_report(document(publication=wrong))


@pytest.mark.parametrize(
    "path", ["/etc/x; run `curl evil`", "etc/x", "/etc/\x1b[2J", "/etc/\u00e9", "/" + "x" * 255, "/", 7]
)
def test_attack_a_changed_file_cannot_read_like_a_command(path: object) -> None:
    with pytest.raises(DocumentError, match="changed_files"):
        parse_report(document(changed_files=[path]))


def test_further_keys_of_a_newer_machine_half_are_ignored() -> None:
    assert parse_report(document(extra={"deep": [1, "\x1b"]})) == parse_report(document())


def test_a_newer_machine_half_may_use_an_unknown_reason() -> None:
    (found,) = parse_report(document(conditions=condition(reason="FoundByANewerRelease"))).conditions
    assert found.reason == "FoundByANewerRelease"


def test_a_programs_error_output_in_a_message_does_not_damage_the_report() -> None:
    message = "nvidia-ctk: \x1b[31mfailed\nat \udc80" + "x" * 3000
    report = parse_report(render_report("", (Condition(LINKED.type, Status.FALSE, "Failed", message),), (), "", "", {}))
    assert report.conditions[0].message.startswith("nvidia-ctk: \\x1b[31mfailed at \\udc80x")


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (b"", "the document"),
        (b"[]", "the document"),
        (b"\xff", "the document"),
        (b"[" * 100_000, "the document"),
        (document(version=2), "version"),
        (document(version="1"), "version"),
        (document(version=True), "version"),
        (document(generation="../../etc"), "generation"),
        (document(conditions={}), "conditions"),
        (document(conditions=condition() * 2), "conditions"),
        (document(conditions=condition(extra=1)), "conditions.0.extra"),
        (document(conditions=condition() * 100), "conditions"),
        (document(conditions=condition(type="Ready\n")), "conditions.0.type"),
        (document(conditions=condition(status="Maybe")), "conditions.0.status"),
        (document(conditions=condition(reason="two words")), "conditions.0.reason"),
        (document(conditions=condition(message="\x1b[2J")), "conditions.0.message"),
        (document(conditions=condition(message="\u202e")), "conditions.0.message"),
        (document(conditions=condition(message="x" * 2001)), "conditions.0.message"),
        (document(cdi_devices=["0\n"]), "cdi_devices.0"),
        (document(cdi_devices=["0", "0"]), "cdi_devices"),
        (document(cdi_devices=["0"] * 5000), "cdi_devices"),
        (document(agent_version=1), "agent_version"),
        (document(repairs=[]), "repairs"),
        (document(repairs={"spec": -1}), "repairs.spec"),
        (document(repairs={"spec": 2**31}), "repairs.spec"),
        (document(repairs={"spec": True}), "repairs.spec"),
        (document(repairs={"another": 1}), "repairs.another"),
        (b" " * (SIZE_LIMIT + 1), "larger than"),
    ],
)
def test_anything_else_is_refused_by_name(data: bytes, key: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_report(data)
    assert str(caught.value).startswith(f"report.json: {key}")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("repairs", "{" + '"":-1,' * 140_000 + '"spec": 1}'),
        ("repairs", json.dumps({f"{number:x}": "" for number in range(70_000)})),
        ("conditions", json.dumps([{f"{number:x}": 1 for number in range(90_000)}])),
    ],
    ids=["one key", "many keys", "a condition"],
)
def test_attack_a_report_that_is_all_wrong_costs_little(name: str, wrong: str) -> None:
    """Each wrong key was an error of a kilobyte: at worst 5 s and 450 MB, almost all that the service may have."""
    data = document(**{name: "?"}).replace(b'"?"', wrong.encode())
    tracemalloc.start()
    try:
        with pytest.raises(DocumentError, match=f"report.json: {name}"):
            parse_report(data)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
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
