"""The form of the terminal that a command prints to, which may be another process's."""

import os
import sys
from contextvars import ContextVar

WIDTH = 80
"""Columns of an output that is not a terminal."""
NARROWEST, WIDEST = 60, 120
"""Columns: text in longer lines is hard to read."""

OTHER: ContextVar[tuple[int, bool] | None] = ContextVar("terminal", default=None)
"""The result of `terminal` in the process that asked the service for an answer."""


def terminal() -> tuple[int, bool]:
    """Return the columns to use, and whether to use colours, unless NO_COLOR is set (no-color.org)."""
    if other := OTHER.get():
        return other
    if not sys.stdout.isatty():
        return WIDTH, False
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns or WIDTH
    except OSError:
        columns = WIDTH
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return min(max(columns, NARROWEST), WIDEST), colour
