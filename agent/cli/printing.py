"""Prints the output of commands. It imports little, because every command needs it, even to report a wrong argument.

No other module prints, except agent.cli.asking, which prints the output that this module captured in the service.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from contextvars import ContextVar

LISTING = "gpus"
"""Stands in CAPTURED instead of a stream's name, if the text is the list of GPUs as JSON. The GPUs' users are not in
that list: the process that asked the service searches for them, and then prints the list (agent.cli.gpu_table)."""
STDOUT = "standard output"
CAPTURED: ContextVar[list[tuple[str, str]] | None] = ContextVar("captured", default=None)
"""The output so far of a command that the service runs for another process, as pairs of stream and text. None in a
command's own process, which prints at once."""


def say(lines: Iterable[str]) -> None:
    """Print the lines of a command's result, and flush them, so that a program that reads a pipe gets them at once.

    Raises OSError.
    """
    captured = CAPTURED.get()
    if captured is not None:
        captured += [("stdout", f"{line}\n") for line in lines]
        return
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except OSError as error:
        # Discard the lines that are still in the buffer. Otherwise Python would try again to write them when it exits.
        ignore_broken_pipe()
        raise OSError(error.errno, error.strerror, error.filename or STDOUT) from error


def hand_over(kind: str, text: str) -> bool:
    """In the service, give `text` to the process for which the service runs the command, and return True.

    `kind`, such as LISTING, says what that process does with the text. In a command's own process, return False.
    """
    captured = CAPTURED.get()
    if captured is None:
        return False
    captured.append((kind, text))
    return True


def report(sentence: str) -> None:
    """Print a message about the command itself: an error, or a remark that does not belong to its result.

    The sentence may quote what a server or program wrote. So control characters are escaped, and all lines but the
    first are indented: the quoted text must not control the terminal, nor look like a message of its own.
    """
    # Imported here: most commands report nothing.
    from agent.model.text import printable

    line = "unbounded-agent: " + "\n  ".join(map(printable, sentence.splitlines()))
    captured = CAPTURED.get()
    if captured is None:
        print(line, file=sys.stderr, flush=True)
    else:
        captured.append(("stderr", f"{line}\n"))


def progress(sentence: str) -> None:
    """Report that a step begins. An empty sentence is only a sign of life from a long step, and is not printed."""
    if sentence:
        report(sentence)


def ignore_broken_pipe() -> None:
    """Discard the rest of the output, after its reader has closed the pipe, as in `unbounded-agent status | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report_failures(failures: Sequence[str]) -> int:
    """Report what failed. Return the exit code: 1 if anything failed, otherwise 0."""
    for failure in failures:
        report(failure)
    return 1 if failures else 0
