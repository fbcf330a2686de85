"""The JSON documents that commands print for programs (docs/json.md). Pure."""

import json
from collections.abc import Mapping

from agent import __version__
from agent.model.text import rfc3339

VERSION = 1
"""Version of the documents. It changes if a key is removed or changes its meaning, but not if a key is added."""


def envelope(command: str, now: float) -> dict[str, object]:
    """Return the keys with which all documents begin. `now` is in seconds since the epoch."""
    return {"version": VERSION, "time": rfc3339(now), "agent": __version__, "command": command}


def document(command: str, now: float, content: Mapping[str, object]) -> str:
    """Return a document as text of several lines."""
    return json.dumps({**envelope(command, now), **content}, indent=2)


def line(command: str, now: float, content: Mapping[str, object]) -> str:
    """Return a document as one line, for a command that prints several."""
    return json.dumps({**envelope(command, now), **content})
