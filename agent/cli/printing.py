"""Prints the output of commands. No other module prints.

It imports little, because every command needs it, even to report a wrong argument.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence

from agent.model.errors import AgentError
from agent.model.text import printable

STDOUT = "standard output"


def say(lines: Iterable[str]) -> None:
    """Print the lines of a command's result, and flush them, so that a program that reads a pipe gets them at once.

    Raises OSError.
    """
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except OSError as error:
        # Discard the lines that are still in the buffer. Otherwise Python would try again to write them when it exits.
        ignore_broken_pipe()
        raise OSError(error.errno, error.strerror, error.filename or STDOUT) from error


def report(sentence: str) -> None:
    """Print a message about the command itself: an error, or a remark that does not belong to its result.

    The sentence may quote what a server or program wrote. So control characters are escaped, and all lines but the
    first are indented: the quoted text must not control the terminal, nor look like a message of its own.
    """
    print("unbounded-agent: " + "\n  ".join(map(printable, sentence.splitlines())), file=sys.stderr, flush=True)


def progress(sentence: str) -> None:
    """Report that a step begins. An empty sentence is only a sign of life from a long step, and is not printed."""
    if sentence:
        report(sentence)


def ignore_broken_pipe() -> None:
    """Discard the rest of the output, after its reader has closed the pipe, as in `unbounded-agent status | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def confirm(what: str, options: argparse.Namespace) -> None:
    """Ask on a terminal, unless --yes is given, whether to remove something. Raises AgentError without a yes.

    A script has no terminal, and gets no question: it has named the machine already.
    """
    if not options.yes and sys.stdin and sys.stdin.isatty() and sys.stderr.isatty():
        print(f"unbounded-agent: {printable(what)}. Continue? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise AgentError("nothing was changed", "answer y, or give --yes")


def report_failures(failures: Sequence[str]) -> int:
    """Report what failed. Return the exit code: 1 if anything failed, otherwise 0."""
    for failure in failures:
        report(failure)
    return 1 if failures else 0


# Returns the width of the terminal that a command prints to, and whether to use colours.


WIDTH = 80
"""Columns for output that does not go to a terminal."""
NARROWEST, WIDEST = 60, 120
"""The fewest and the most columns to use. Text in longer lines is hard to read."""


def terminal() -> tuple[int, bool]:
    """Return the columns to use, and whether to use colours.

    Colours are only for a terminal that can show them, and not if NO_COLOR is set (no-color.org).
    """
    if not sys.stdout.isatty():
        return WIDTH, False
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns or WIDTH
    except OSError:
        columns = WIDTH
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return min(max(columns, NARROWEST), WIDEST), colour
