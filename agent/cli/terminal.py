"""Returns the width of the terminal that a command prints to, and whether to use colours."""

import os
import sys

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
