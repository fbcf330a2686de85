"""Prints what a command has to say. The only module that prints; it loads quickly, because even errors need it."""

import sys
from collections.abc import Iterable, Sequence


def say(lines: Iterable[str]) -> None:
    """Print the lines of a command's result. A program that reads them from a pipe gets them at once."""
    for line in lines:
        print(line)
    sys.stdout.flush()


def report(sentence: str) -> None:
    """Print a message about the command itself: an error, or a remark that does not belong to its result."""
    print(f"unbounded-agent: {sentence}", file=sys.stderr, flush=True)


def progress(sentence: str) -> None:
    """Report that a step begins. An empty text means that a part of a step is done: nothing is printed then."""
    if sentence:
        report(sentence)


def report_failures(failures: Sequence[str]) -> int:
    """Report what failed. Return the exit code: 1 if anything failed, otherwise 0."""
    for failure in failures:
        report(failure)
    return 1 if failures else 0
