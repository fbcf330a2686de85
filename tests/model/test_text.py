"""Numbers in messages. Printable text has its own tests, test_printable.py."""

from agent.model.text import counted


def test_a_single_thing_has_no_plural() -> None:
    assert [counted(number, "GPU") for number in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
    assert [counted(number, "process", "processes") for number in (1, 2)] == ["1 process", "2 processes"]
