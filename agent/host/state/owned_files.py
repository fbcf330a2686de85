"""The ownership record: the files that this agent wrote, with digests of their content. Pure."""

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping

from agent.model.errors import DocumentError
from agent.model.paths import OWNED

VERSION = 1
MARK = b"# Written by unbounded-agent"
"""The first bytes of every text file of ours."""
DIGEST = re.compile(r"[0-9a-f]{64}")
"""SHA-256 in hexadecimal."""


def is_ours(content: bytes, digest: str) -> bool:
    """Return whether a recorded file is still ours: unchanged, or edited (edits are overwritten, as its header says).

    A file without our first line replaced ours. But an empty or zeroed file is ours: some file systems leave one after
    a loss of power.
    """
    lost = not content.strip(b"\0")
    return lost or hashlib.sha256(content).hexdigest() == digest or content.startswith(MARK)


def render_owned(files: Mapping[str, str]) -> bytes:
    """Return the document for digests by absolute path."""
    return json.dumps({"version": VERSION, "files": dict(files)}, indent=1, sort_keys=True).encode() + b"\n"


def parse_owned(data: bytes) -> dict[str, str]:
    """Return digests by path. Raises DocumentError for a document that is corrupt, or of another version."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _bad(f"not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise _bad(f"not a record of version {VERSION}")
    files = document.get("files")
    if not isinstance(files, dict):
        raise _bad("key files must be an object")
    for path, digest in files.items():
        # Recorded files may be removed later, so accept only paths that cannot mean another file.
        if not path.startswith("/") or posixpath.normpath(path) != path or not path.isprintable():
            raise _bad(f"files: {path!r} is not a normal absolute path")
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise _bad(f"files: {path}: {digest!r} is not a SHA-256 digest")
    return dict(files)


def _bad(what: str) -> DocumentError:
    return DocumentError(f"{OWNED}: {what}", "discarding it; the agent adopts files that are as it writes them")
