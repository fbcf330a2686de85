"""What several steps of a run need is computed once."""

import pytest

from agent.machine.notes import Once


def test_a_result_is_computed_once_and_an_error_is_not_kept() -> None:
    once, calls = Once(), list[str]()

    def compute() -> str:
        calls.append("call")
        if len(calls) == 1:
            raise OSError("not now")
        return "result"

    with pytest.raises(OSError, match="not now"):
        once.get("name", compute)
    assert [once.get("name", compute), once.get("name", compute)] == ["result", "result"]
    assert len(calls) == 2
