"""The list of the files that `up` put into a machine, as JSON. With it, the machine half notices changed files. Pure.

The document has the keys `version` and `files`. `files` is an object: its keys are paths in the machine, and each value
is a list of two items, the file's SHA-256 digest and its size in bytes.
"""

import json
import re
from collections.abc import Mapping

from agent.model.errors import DocumentError
from agent.model.json_document import accept_version, mapping, parse_object

VERSION = 1
PATH = re.compile(r"/[!#%()*+,\-./0-9:=?@A-Z\[\]^_a-z{}~]{1,254}")
"""The form of a path that may be listed. Other paths could read like commands, and an administrator sees a changed
file's path next to the agent's advice."""


def render_node_files(files: Mapping[str, tuple[str, int]]) -> bytes:
    """Return the document, without files whose paths may not be listed; the same files give the same bytes."""
    listed = {path: file for path, file in files.items() if PATH.fullmatch(path)}
    return json.dumps({"version": VERSION, "files": listed}, indent=1, sort_keys=True).encode() + b"\n"


def parse_node_files(where: str, data: bytes) -> dict[str, tuple[str, int]]:
    """Return digests and sizes by path. Raises DocumentError."""
    document = parse_object(where, data)
    accept_version(where, document, (VERSION,))
    found = {}
    for path, file in mapping(where, document, "files", list).items():
        if not PATH.fullmatch(path):
            raise DocumentError(f"{where}: key files has a path that may not be listed: {path[:100]!a}")
        match file:
            case [str(digest), int(size)]:
                found[path] = (digest, size)
            case _:
                raise DocumentError(f"{where}: files[{path!a}] must be a list of digest and size")
    return found
