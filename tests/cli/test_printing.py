"""Programs that follow a command get each of its lines when it is printed."""

import sys
from pathlib import Path

import pytest

from agent.cli.printing import say


def test_a_line_reaches_a_pipe_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has a buffer for a pipe, as for a file, and does not write it at the end of a line."""
    place = tmp_path / "output"
    with place.open("w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        say(["one", "two"])
        assert place.read_bytes() == b"one\ntwo\n"
