"""The ownership record: which files this agent wrote, with the digests of what it wrote. Pure."""

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping

from agent.errors import DocumentError
from agent.paths import OWNED

VERSION = 1
MARK = b"# Written by unbounded-agent"
"""How every text file of ours begins."""
DIGEST = re.compile(r"[0-9a-f]{64}")
"""SHA-256 in hexadecimal."""


def is_ours(content: bytes, digest: str) -> bool:
    """Whether a recorded file is still ours: as it was written, or edited since (which is overwritten, as it says).

    A file without our first line was put there by somebody else in place of ours.
    """
    return hashlib.sha256(content).hexdigest() == digest or content.startswith(MARK)


def render_owned(files: Mapping[str, str]) -> bytes:
    """The document for digests by absolute path."""
    return json.dumps({"version": VERSION, "files": dict(files)}, indent=1, sort_keys=True).encode() + b"\n"


def parse_owned(data: bytes) -> dict[str, str]:
    """Digests by path. Raises DocumentError for a document that is corrupt, or of another version."""
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
        # What is recorded may be removed one day: a path that could mean two files is no record of ours.
        if not path.startswith("/") or posixpath.normpath(path) != path or not path.isprintable():
            raise _bad(f"files: {path!r} is not a normal absolute path")
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise _bad(f"files: {path}: {digest!r} is not a SHA-256 digest")
    return dict(files)


def _bad(what: str) -> DocumentError:
    return DocumentError(f"{OWNED}: {what}", "it is discarded; files that are as this agent writes them are adopted")
