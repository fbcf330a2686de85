"""Prints what a command has to say. The only module that prints; it loads quickly, because even errors need it."""

import os
import sys
from collections.abc import Iterable, Sequence
from contextvars import ContextVar

LISTING = "gpus"
"""Not a stream of output, but the text of a list that the other process completes (agent.cli.gpu_table)."""
CAPTURED: ContextVar[list[tuple[str, str]] | None] = ContextVar("captured", default=None)
"""The output so far, as streams and texts, of a command whose output another process prints; otherwise None."""


def say(lines: Iterable[str]) -> None:
    """Print the lines of a command's result. A program that reads them from a pipe gets them at once."""
    captured = CAPTURED.get()
    for line in lines:
        if captured is None:
            print(line)
        else:
            captured.append(("stdout", f"{line}\n"))
    if captured is None:
        sys.stdout.flush()


def hand_over(stream: str, text: str) -> bool:
    """Leave the rest of the work to the other process that prints the output. Return False if there is none."""
    captured = CAPTURED.get()
    if captured is None:
        return False
    captured.append((stream, text))
    return True


def report(sentence: str) -> None:
    """Print a message about the command itself: an error, or a remark that does not belong to its result."""
    line = f"unbounded-agent: {sentence}"
    captured = CAPTURED.get()
    if captured is None:
        print(line, file=sys.stderr, flush=True)
    else:
        captured.append(("stderr", f"{line}\n"))


def progress(sentence: str) -> None:
    """Report that a step begins. An empty text means that a part of a step is done: nothing is printed then."""
    if sentence:
        report(sentence)


def ignore_broken_pipe() -> None:
    """Discard what is still to be printed. `unbounded-agent status | head`: the reader has all that it wants."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report_failures(failures: Sequence[str]) -> int:
    """Report what failed. Return the exit code: 1 if anything failed, otherwise 0."""
    for failure in failures:
        report(failure)
    return 1 if failures else 0
