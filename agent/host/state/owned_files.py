"""Format of the ownership record: the files that the agent wrote, with digests of their content. Pure."""

import posixpath
from typing import Annotated

from msgspec import Meta, Struct

from agent.host.state.record import Record
from agent.model.digest import sha256
from agent.model.errors import DocumentError
from agent.model.json_document import NAME_SHOWN

MARK = b"# Written by unbounded-agent"
"""The first bytes of every settings file that the agent writes on the host. Its JSON files do not have them."""


def is_ours(content: bytes, digest: str) -> bool:
    """Return whether a recorded file is still the agent's.

    A file is the agent's if it is unchanged, or still begins with the agent's first line, which warns that edits are
    overwritten. An empty or zeroed file, which some file systems leave after a loss of power, is the agent's too. Any
    other content means that somebody has replaced the file.
    """
    no_content = not content.strip(b"\0")
    return no_content or sha256(content) == digest or content.startswith(MARK)


class Owned(Struct, frozen=True):
    """The whole record."""

    files: dict[str, Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]]
    """SHA-256 digests in hexadecimal, by path."""


class _OwnedFiles(Record[Owned]):
    def parse(self, where: str, data: bytes) -> Owned:
        owned = super().parse(where, data)
        # Recorded files may be removed later, so only paths are accepted that cannot lead to a different file.
        for path in owned.files:
            if not path.startswith("/") or posixpath.normpath(path) != path or not path.isprintable():
                raise DocumentError(f"{where}: key files[{path[:NAME_SHOWN]!a}] must be a normal absolute path", ADVICE)
        return owned


ADVICE = "discarding it; the agent recognises its settings files by their first line"
OWNED_FILES = _OwnedFiles(Owned, 1, advice=ADVICE)
