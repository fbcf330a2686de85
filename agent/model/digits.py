"""Parses numbers in text that the kernel and programs write."""

DIGITS = 18
"""More than any such number has. Without a limit, int() raises ValueError at 4,301 (sys.set_int_max_str_digits)."""


def whole_number(text: str) -> int | None:
    """Return None for anything but ASCII digits; int() would accept digits of other scripts too."""
    return int(text) if len(text) <= DIGITS and text.isascii() and text.isdecimal() else None
