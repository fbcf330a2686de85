"""Reads, validates and writes the JSON files in which the host half keeps its state."""

import json
from typing import Any, Generic, TypeVar

from agent.model.errors import DocumentError, ObservationError
from agent.model.facts import Absent, Broken, Seen, Unseen
from agent.model.json_document import accept_version
from agent.model.typed_json import convert, decode, to_builtins
from agent.system.damage import discard, write_record
from agent.system.files import System
from agent.system.seen import read_seen

T = TypeVar("T")


class Record(Generic[T]):
    """The format of a JSON file that keeps an object of type T."""

    def __init__(self, kind: type[T], version: int | None = None, *, advice: str = "") -> None:
        """Define the format.

        `kind` is T. Without a version, the file has no key `version`. `advice` is added to messages about a damaged
        file.
        """
        self._kind, self._version, self._advice = kind, version, advice

    def render(self, value: T) -> bytes:
        """Return the content of the file for a value."""
        version = {"version": self._version} if self._version else {}
        return json.dumps({**version, **to_builtins(value)}, indent=1).encode() + b"\n"

    def parse(self, where: str, data: bytes) -> T:
        """Return the value in the content of a file. Raises DocumentError, which names the key if one is wrong."""
        try:
            document = decode(where, data, dict[str, Any])
            if self._version:
                accept_version(where, document, self._version)
                del document["version"]
            return convert(where, document, self._kind)
        except DocumentError as error:
            raise DocumentError(error.message, self._advice or error.hint) from error

    def read_seen(self, path: str, system: System) -> Seen[T]:
        """Return the value in a file; Broken if the file is damaged, which the caller must report."""
        data = read_seen(system.read, path)
        try:
            return self.parse(path, data) if isinstance(data, bytes) else data
        except DocumentError as error:
            return Broken(str(error))

    def read(self, path: str, system: System) -> T | None:
        """Return the value in a file; None if the file is missing or unusable. A damaged file is discarded."""
        try:
            return self.read_known(path, system)
        except ObservationError:
            return None

    def read_known(self, path: str, system: System) -> T | None:
        """Do what `read` does, but raise ObservationError if the file cannot be read now."""
        found = self.read_seen(path, system)
        if isinstance(found, Unseen):
            raise ObservationError(found.why)
        if isinstance(found, Broken):
            discard(path, found.why, system)
        return None if isinstance(found, Absent | Broken) else found

    def write(self, path: str, value: T, system: System, mode: int = 0o644) -> None:
        """Write a value to a file. Raises OSError."""
        write_record(system, path, self.render(value), mode)
