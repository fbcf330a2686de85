"""Keeps records that must not be lost: two synced copies of one JSON document with its digest.

The first copy is written first, so it is the newer one after a crash between the two writes. A damaged copy is replaced
at the next write. If no copy is intact, the record is Broken, and its owner must not guess what it contained.
"""

import hashlib
import json
from typing import Generic, TypeVar

from agent.host.state.record import Record
from agent.model.errors import DocumentError
from agent.model.facts import Absent, Broken, Seen, Unseen
from agent.model.json_document import accept_version, get, parse_object
from agent.system.damage import write_record
from agent.system.files import System
from agent.system.seen import read_seen

T = TypeVar("T")
VERSION = 1


class Durable(Generic[T]):
    """The format of a record that keeps an object of type T in two files."""

    def __init__(self, kind: type[T]) -> None:
        self._content = Record(kind)

    def render(self, value: T) -> bytes:
        """Return the content of both files."""
        content = json.loads(self._content.render(value))
        document = {"version": VERSION, "digest": _digest(content), "content": content}
        return json.dumps(document, indent=1).encode() + b"\n"

    def read(self, paths: tuple[str, str], system: System) -> Seen[T]:
        """Return the record in the first intact copy.

        Without an intact copy, the record is Unseen if a copy could not be read, Broken if one is damaged, and Absent
        if both are missing.
        """
        copies = [self._copy(path, system) for path in paths]
        for copy in copies:
            if not isinstance(copy, Absent | Broken | Unseen):
                return copy
        worst = next((each for kind in (Unseen, Broken) for each in copies if isinstance(each, kind)), copies[0])
        return worst

    def write(self, paths: tuple[str, str], value: T, system: System) -> None:
        """Write both copies durably. Raises OSError."""
        content = self.render(value)
        for path in paths:
            write_record(system, path, content)

    def remove(self, paths: tuple[str, str], system: System) -> None:
        """Remove both copies. Raises OSError."""
        # Start with the second copy, so that the record can be read until both are removed.
        for path in reversed(paths):
            system.remove(path)

    def _copy(self, path: str, system: System) -> Seen[T]:
        data = read_seen(system.read, path)
        if not isinstance(data, bytes):
            return data
        try:
            return self._parse(path, data)
        except DocumentError as error:
            return Broken(str(error))

    def _parse(self, path: str, data: bytes) -> T:
        document = parse_object(path, data)
        accept_version(path, document, (VERSION,))
        content = get(path, document, "content", dict)
        if get(path, document, "digest", str) != _digest(content):
            raise DocumentError(f"{path}: the content does not match its digest")
        return self._content.parse(path, json.dumps(content).encode())


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
