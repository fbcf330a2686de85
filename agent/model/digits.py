"""Parses numbers in text that the kernel and programs write."""

DIGITS = 18
"""Digits of the longest number that is accepted. Without a limit, int() would raise ValueError at 4,301 digits
(sys.set_int_max_str_digits)."""


def whole_number(text: str) -> int | None:
    """Return the number; None unless the text is 1 to DIGITS ASCII digits. int() would accept other scripts' digits."""
    return int(text) if len(text) <= DIGITS and text.isascii() and text.isdecimal() else None
