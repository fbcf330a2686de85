"""Records of host state: JSON files that are read, validated and written in one way."""

import json
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from agent.model.errors import DocumentError
from agent.model.facts import Absent, Broken, Seen, Unseen
from agent.model.json_document import accept_version, parse_object
from agent.system.damage import discard, write_record
from agent.system.files import System
from agent.system.seen import look

T = TypeVar("T")


class Record(Generic[T]):
    """What such a file holds: an object of type T, with a version in it if there are any versions."""

    def __init__(self, adapter: TypeAdapter[T], *versions: int, advice: str = "") -> None:
        """Of several versions, the first is written. `advice` ends the message about a damaged file."""
        self._adapter, self._versions, self._advice = adapter, versions, advice

    def render(self, value: T) -> bytes:
        """Return the file's content."""
        version = {"version": self._versions[0]} if self._versions else {}
        document = self._adapter.dump_python(value, mode="json", exclude_unset=True)
        return json.dumps({**version, **document}, indent=1).encode() + b"\n"

    def parse(self, where: str, data: bytes) -> T:
        """Read the file's content. Raises DocumentError, which names the key."""
        try:
            document = parse_object(where, data)
            if self._versions:
                accept_version(where, document, self._versions)
                del document["version"]
            # As JSON, which has no tuples: what is strict would refuse a list for one.
            return self._adapter.validate_json(json.dumps(document), strict=True)
        except ValidationError as error:
            raise DocumentError(f"{where}: {_first(error)}", self._advice) from error
        except DocumentError as error:
            raise DocumentError(error.message, self._advice or error.hint) from error

    def look(self, path: str, system: System) -> Seen[T]:
        """Return the record. Broken: it is damaged, which the caller tells."""
        data = look(system.read, path)
        try:
            return self.parse(path, data) if isinstance(data, bytes) else data
        except DocumentError as error:
            return Broken(str(error))

    def read(self, path: str, system: System) -> T | None:
        """Return the record; None without a usable one. A damaged one is discarded."""
        found = self.look(path, system)
        if isinstance(found, Broken):
            discard(path, found.why)
        return None if isinstance(found, Absent | Broken | Unseen) else found

    def write(self, path: str, value: T, system: System) -> None:
        """Replace the file. Raises OSError."""
        write_record(system, path, self.render(value))


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    # No place: half of a surrogate pair, with which pydantic refuses the whole document.
    name, *inner = first["loc"] or ("",)
    key = f"key {name}{''.join(f'[{part!a}]' for part in inner)}" if name else "the document"
    if first["type"].endswith("_type"):
        return f"{key} must be {first['type'].removesuffix('_type')}, not {type(first['input']).__name__}"
    return f"{key}: {first['msg']}"
