"""Format of the ownership record: the files that the agent wrote, with digests of their content. Pure."""

import hashlib
import posixpath
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

from agent.host.state.record import Record

MARK = b"# Written by unbounded-agent"
"""The first bytes of every settings file that the agent writes on the host. Its JSON files do not have them."""


def is_ours(content: bytes, digest: str) -> bool:
    """Return whether a recorded file is still the agent's.

    A file is the agent's if it is unchanged, or still begins with the agent's first line, which warns that edits are
    overwritten. An empty or zeroed file, which some file systems leave after a loss of power, is the agent's too. Any
    other content means that somebody has replaced the file.
    """
    no_content = not content.strip(b"\0")
    return no_content or hashlib.sha256(content).hexdigest() == digest or content.startswith(MARK)


def _normal(path: str) -> str:
    # Recorded files may be removed later, so only paths are accepted that cannot lead to a different file.
    if not path.startswith("/") or posixpath.normpath(path) != path or not path.isprintable():
        raise ValueError("not a normal absolute path")
    return path


@dataclass(frozen=True)
class Owned:
    """The whole record."""

    files: dict[Annotated[str, AfterValidator(_normal)], Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]]
    """SHA-256 digests in hexadecimal, by path."""


OWNED_FILES = Record(Owned, 1, advice="discarding it; the agent adopts files with the content that it would write")
