"""Names that any user may have chosen are shown with invisible characters escaped."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.host.observe.machine import parse_report
from agent.model.conditions import ConditionType, Reason, true
from agent.model.handoff import Report, render_report
from agent.model.text import one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, Ünïcode, 漢字, 🖥", "plain, Ünïcode, 漢字, 🖥"),
        ("two\nlines\tand\u2028three\u00a0parts", "two lines and three parts"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("invoice\u202egpj.exe", "invoice\\u202egpj.exe"),
        ("gpu\u200b-node\u2066\ufeff", "gpu\\u200b-node\\u2066\\ufeff"),
        ("a\u3164b\u034f\u2800", "a\\u3164b\\u034f\\u2800"),
        ("a\ufe0fb\U000e0100", "a\\ufe0fb\\U000e0100"),
        (b"caf\xe9".decode(errors="surrogateescape"), "caf\\udce9"),
    ],
)
def test_invisible_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert one_line(text) == shown
    assert true(ConditionType.READY, Reason.ALL_CONDITIONS_TRUE, text).message == shown


@given(st.text())
def test_any_text_is_one_visible_line(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)


def test_a_machine_cannot_report_invisible_text() -> None:
    """The machine half escapes its messages, but root in a machine can replace the machine half."""
    condition = true(ConditionType.CDI_SPEC_CURRENT, Reason.VERIFIED, "x")
    document = json.loads(render_report(Report("a" * 64, (condition,), (), "", "1", {})))
    document["conditions"][0]["message"] = "gpu\u3164node"
    (found,) = parse_report(json.dumps(document).encode()).conditions
    assert found.message == "gpu\\u3164node"
