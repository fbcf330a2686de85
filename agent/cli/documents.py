"""The JSON documents that commands print for programs (docs/json.md). Pure."""

import json
from collections.abc import Mapping

from agent import __version__
from agent.model.text import rfc3339

VERSION = 1
"""Version of the documents. It changes if a key is removed or changes its meaning, but not if a key is added."""


def document(command: str, now: float, content: Mapping[str, object], *, indent: int | None = 2) -> str:
    """Return a document as text. `now` is in seconds since the epoch.

    With `indent=None`, the document is on one line, for a command that prints several documents.
    """
    envelope = {"version": VERSION, "time": rfc3339(now), "agent": __version__, "command": command}
    return json.dumps({**envelope, **content}, indent=indent)
