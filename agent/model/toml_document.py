"""Parses TOML. Pure."""

import re
import tomllib
from typing import Any

PARTS = 100
"""Parts of the longest dotted key that is parsed. tomllib's time grows with their square: 1 MiB of them takes minutes.
No program's configuration has a key of more than ten."""
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
# The first assertion makes the search start once for each word: otherwise a long word would take its length's square.
LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:\.[ \t]*+{_PART}){{{PARTS}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the document. Raises ValueError, or RecursionError if its keys or values are nested too deeply."""
    if LONG_KEY.search(text):
        raise RecursionError(f"a key has more than {PARTS} parts")
    return tomllib.loads(text)
