"""Returns the width of the terminal that a command prints to, and whether to use colours.

If the service runs the command, this is the terminal of the process that asked the service.
"""

import os
import sys
from contextvars import ContextVar

WIDTH = 80
"""Columns for output that does not go to a terminal."""
NARROWEST, WIDEST = 60, 120
"""The fewest and the most columns to use. Text in longer lines is hard to read."""

ASKING_TERMINAL: ContextVar[tuple[int, bool] | None] = ContextVar("terminal", default=None)
"""The result of `terminal` in the process that asked the service to run a command; None in a command's own process."""


def terminal() -> tuple[int, bool]:
    """Return the columns to use, and whether to use colours.

    Colours are only for a terminal that can show them, and not if NO_COLOR is set (no-color.org).
    """
    if asking := ASKING_TERMINAL.get():
        return asking
    if not sys.stdout.isatty():
        return WIDTH, False
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns or WIDTH
    except OSError:
        columns = WIDTH
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return min(max(columns, NARROWEST), WIDEST), colour
