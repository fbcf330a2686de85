"""Programs that follow a command get each of its lines when it is printed."""

import io
import sys

import pytest

from agent.cli.printing import say


def test_a_line_reaches_a_pipe_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.BytesIO()
    # As Python opens a pipe: with a buffer, which is not written at the end of a line.
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(_Raw(pipe))))
    say(["one", "two"])
    assert pipe.getvalue() == b"one\ntwo\n"


class _Raw(io.RawIOBase):
    def __init__(self, pipe: io.BytesIO) -> None:
        self._pipe = pipe

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        return self._pipe.write(bytes(data))  # type: ignore[call-overload, no-any-return]
