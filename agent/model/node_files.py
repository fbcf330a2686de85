"""The list of the files that `up` put into a machine. With it, the machine half notices changed files. Pure."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from agent.model.errors import DocumentError
from agent.model.json_document import HOST, parse_document, render_document

VERSION = 1
PATH = re.compile(r"/[!#%()*+,\-./0-9:=?@A-Z\[\]^_a-z{}~]{1,254}")
"""The form of a path that may be listed. Other paths could read like commands, and an administrator sees a changed
file's path next to the agent's advice."""


class Original(NamedTuple):
    """A file as `up` wrote it."""

    sha256: str
    size: int


class _Document(NamedTuple):
    files: dict[str, Original]
    """By path in the machine."""


def render_node_files(files: Mapping[str, tuple[str, int]]) -> bytes:
    """Return the document, without files whose paths may not be listed; the same files give the same bytes.

    `files` has digest and size by path.
    """
    listed = {path: Original(*files[path]) for path in sorted(files) if PATH.fullmatch(path)}
    return render_document(VERSION, _Document(listed))


def parse_node_files(where: str, data: bytes) -> dict[str, Original]:
    """Return the files by path. Raises DocumentError."""
    files = parse_document(where, data, _Document, VERSION, HOST).files
    for path in files:
        if not PATH.fullmatch(path):
            raise DocumentError(f"{where}: key files has a path that may not be listed: {path[:100]!a}")
    return files
