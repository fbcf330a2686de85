"""Parses TOML. Pure."""

import re
import tomllib
from typing import Any

from agent.model.json_document import decoded

PARTS = 100
"""The largest number of parts in a dotted key. The time that tomllib takes grows with the square of that number: a key
of 1 MiB takes minutes. No known configuration has a key with more than ten parts."""
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
# The lookbehind makes the search start only once in each word. Otherwise, the time for a long word would grow with the
# square of its length.
LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:\.[ \t]*+{_PART}){{{PARTS}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the document. Raises ValueError for any that is invalid, or nested too deeply."""
    if LONG_KEY.search(text):
        raise ValueError(f"nested too deeply: a key has more than {PARTS} parts")
    return decoded(tomllib.loads, text)  # type: ignore[no-any-return]
