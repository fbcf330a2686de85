"""Keeps records that must not be lost: each is a JSON document with its digest, in two synced copies.

The first copy is written first. So after a crash between the two writes, the first copy is the newer one. The next
write replaces a damaged copy. If no copy is intact (see `Durable.read`), the record's owner must not guess what the
record contained.
"""

import json
from typing import Generic, TypeVar

from agent.host.state.record import Record
from agent.model.digest import json_digest
from agent.model.errors import DocumentError
from agent.model.facts import Absent, Broken, Seen, Unseen
from agent.model.json_document import accept_version, get, parse_object
from agent.system.files import System

T = TypeVar("T")
VERSION = 1


class _Copy(Record[T]):
    """The format of one copy."""

    def render(self, value: T) -> bytes:
        content = json.loads(super().render(value))
        document = {"version": VERSION, "digest": json_digest(content), "content": content}
        return json.dumps(document, indent=1).encode() + b"\n"

    def parse(self, where: str, data: bytes) -> T:
        document = parse_object(where, data)
        accept_version(where, document, VERSION)
        content = get(where, document, "content", dict)
        if get(where, document, "digest", str) != json_digest(content):
            raise DocumentError(f"{where}: the content does not match its digest")
        return super().parse(where, json.dumps(content).encode())


class Durable(Generic[T]):
    """The format of a record that keeps an object of type T in two files."""

    def __init__(self, kind: type[T]) -> None:
        self._copy = _Copy(kind)

    def read(self, paths: tuple[str, str], system: System) -> Seen[T]:
        """Return the record in the first intact copy.

        Without an intact copy, return Unseen if a copy could not be read, otherwise Broken if a copy is damaged, and
        Absent if both copies are missing.
        """
        copies = [self._copy.read_seen(path, system) for path in paths]
        for copy in copies:
            if not isinstance(copy, Absent | Broken | Unseen):
                return copy
        return next((each for kind in (Unseen, Broken) for each in copies if isinstance(each, kind)), copies[0])

    def write(self, paths: tuple[str, str], value: T, system: System) -> None:
        """Write both copies durably. Only root may read them. Raises OSError."""
        for path in paths:
            self._copy.write(path, value, system, 0o600)

    def remove(self, paths: tuple[str, str], system: System) -> None:
        """Remove both copies. Raises OSError."""
        # Start with the second copy, so that the record can be read until both are removed.
        for path in reversed(paths):
            system.remove(path)
