"""Writes lines to standard error, in the form that systemd reads for the journal."""

import sys

from agent.model.conditions import Condition, Status

INFO, WARNING, ERROR = "<6>", "<4>", "<3>"
"""Priorities, which precede a line (sd-daemon(3))."""


def say(priority: str, text: str) -> None:
    """Write the text to standard error. Unless that is a terminal, each line starts with the priority."""
    # The module logging is not used: importing it takes a fifth of a run that changes nothing.
    prefix = "" if sys.stderr.isatty() else priority
    sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.splitlines()))


def say_changes(before: dict[str, object], conditions: tuple[Condition, ...]) -> dict[str, str]:
    """Log the conditions that differ from `before`. Return what the next run has to pass as `before`.

    Logging all of them each minute would fill the journal with the same lines.
    """
    now = {each.type.value: f"{each.status} {each.reason}: {each.message}" for each in conditions}
    for each in conditions:
        if before.get(each.type.value) != now[each.type.value]:
            say(INFO if each.status is Status.TRUE else WARNING, f"{each.type} {now[each.type.value]}")
    return now
