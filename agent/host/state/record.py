"""Reads, validates and writes the JSON files in which the host half keeps its state."""

from typing import TypeVar

from agent.model.errors import DocumentError, ObservationError
from agent.model.facts import Absent, Broken, Seen, Unseen
from agent.model.typed_json import Format
from agent.system.damage import discard, write_record
from agent.system.files import System
from agent.system.seen import read_seen

T = TypeVar("T")


class Record(Format[T]):
    """The format of a JSON file that keeps an object of type T."""

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
