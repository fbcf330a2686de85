"""Numbers in messages. Printable text has its own tests, test_printable.py."""

from agent.model.text import counted, first_of


def test_a_single_thing_has_no_plural() -> None:
    assert [counted(number, "GPU") for number in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
    assert [counted(number, "process", "processes") for number in (1, 2)] == ["1 process", "2 processes"]


def test_a_long_list_ends_with_how_many_more_there_are() -> None:
    assert [first_of("abc", number) for number in (1, 2, 3, 4)] == ["a and 2 more", "a, b and 1 more", *["a, b, c"] * 2]
    assert first_of(("a 1", "b 2", "c 3"), 2, "; ") == "a 1; b 2 and 1 more"
