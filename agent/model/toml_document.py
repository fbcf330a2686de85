"""Parses TOML. Pure."""

import re
import tomllib
from typing import Any

PARTS = 100
"""The largest number of parts in a dotted key. The time that tomllib takes grows with the square of that number: a key
of 1 MiB takes minutes. No known configuration has a key with more than ten parts."""
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
# The lookbehind makes the search start only once in each word. Otherwise, the time for a long word would grow with the
# square of its length.
LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:\.[ \t]*+{_PART}){{{PARTS}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the document. Raises ValueError, or RecursionError if its keys or values are nested too deeply."""
    if LONG_KEY.search(text):
        raise RecursionError(f"a key has more than {PARTS} parts")
    return tomllib.loads(text)
