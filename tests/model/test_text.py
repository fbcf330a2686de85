"""Text in messages: numbers, and names that any user may have chosen, without invisible characters."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.host.observe.machine import parse_report
from agent.model.conditions import ConditionType, Reason, true
from agent.model.errors import CommandError, ExitCodeError
from agent.model.handoff import Report, render_report
from agent.model.text import counted, first_of, one_line, printable, quoted


def test_a_single_thing_has_no_plural() -> None:
    assert [counted(number, "GPU") for number in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
    assert [counted(number, "process", "processes") for number in (1, 2)] == ["1 process", "2 processes"]


def test_a_long_list_ends_with_how_many_more_there_are() -> None:
    assert [first_of("abc", number) for number in (1, 2, 3, 4)] == ["a and 2 more", "a, b and 1 more", *["a, b, c"] * 2]
    assert first_of(("a 1", "b 2", "c 3"), 2, "; ") == "a 1; b 2 and 1 more"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a; all is well", "'a; all is well'"),
        ("a\nb", r"'a\nb'"),
        ("it's", '"it\'s"'),
        ("\u0430dmin", r"'\u0430dmin'"),
        ("e\u0301", r"'e\u0301'"),
        ("a\u3164", r"'a\u3164'"),
        ("\udcff", r"'\udcff'"),
        ("", "''"),
        ("x" * 301, "x" * 300 + "..."),
        ("; " * 200, "'" + "; " * 150 + "...'"),
    ],
)
def test_other_text_of_outsiders_is_quoted_and_bounded(text: str, shown: str) -> None:
    assert quoted(text) == shown


def test_marks_and_blanks_are_visible() -> None:
    """An enclosing mark, an accent as a character of its own, and fillers."""
    assert printable("a\u20dd\u0301\u3164\u2800b") == r"a\u20dd\u0301\u3164\u2800b"
    assert printable("\u00e9") == "\u00e9"


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


def test_an_error_says_first_what_failed_and_why() -> None:
    """`status` cut off the reason: the command of nvidia-ctk alone has 430 characters."""
    assert str(ExitCodeError(("ldconfig", "-p"), 1, "no\n cache")) == "ldconfig -p: exit code 1: no cache"
    long = ("/usr/bin/nvidia-ctk", "cdi", "generate", *(f"--option={'x' * 20}{number}" for number in range(20)))
    whole = f"; the whole command: {' '.join(long)}"
    for stderr, more in (("", ""), ("failed to initialize NVML", ": failed to initialize NVML")):
        message = str(CommandError(long, "killed by signal 11", stderr))
        assert message == f"/usr/bin/nvidia-ctk cdi generate ...: killed by signal 11{more}{whole}"
    message = str(CommandError(("kubectl", "patch", "x" * 10_000), "stopped after its time limit of 10 s"))
    assert "stopped after its time limit" in message[:150], "one long argument does not come first either"
