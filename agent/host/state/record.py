"""Reads, validates and writes the JSON files in which the host half keeps its state."""

import json
from functools import cached_property
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from agent.model.errors import DocumentError
from agent.model.facts import Absent, Broken, Seen, Unseen
from agent.model.json_document import accept_version, in_json, parse_object
from agent.system.damage import discard, write_record
from agent.system.files import System
from agent.system.seen import read_seen

T = TypeVar("T")
PYDANTIC_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "string": "a string",
    "bool": "a boolean",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "frozen_set": "a list",
    "dict": "an object",
    "model": "an object",
    "dataclass": "an object",
}
"""JSON's words for the types in pydantic's errors."""


class Record(Generic[T]):
    """The format of a JSON file that keeps an object of type T."""

    def __init__(self, kind: type[T], *versions: int, advice: str = "") -> None:
        """Define the format.

        `kind` is T. pydantic models in it set `defer_build`, so that a command builds only those that it uses.
        `versions` are the versions that can be read; the first of them is written. If there are none, the file has no
        key `version`. `advice` is added to messages about a damaged file.
        """
        self._kind, self._versions, self._advice = kind, versions, advice

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        # Made at first use, because making it takes about a millisecond.
        return TypeAdapter(self._kind)

    def render(self, value: T) -> bytes:
        """Return the content of the file for a value."""
        version = {"version": self._versions[0]} if self._versions else {}
        document = self._adapter.dump_python(value, mode="json", exclude_unset=True)
        return json.dumps({**version, **document}, indent=1).encode() + b"\n"

    def parse(self, where: str, data: bytes) -> T:
        """Return the value in the content of a file. Raises DocumentError, which names the key if one is wrong."""
        try:
            document = parse_object(where, data)
            if self._versions:
                accept_version(where, document, self._versions)
                del document["version"]
            # Validated as JSON, because pydantic in strict mode does not accept a Python list for a tuple.
            return self._adapter.validate_json(json.dumps(document), strict=True)
        except ValidationError as error:
            raise DocumentError(f"{where}: {_first_problem(error)}", self._advice) from error
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
        found = self.read_seen(path, system)
        if isinstance(found, Broken):
            discard(path, found.why)
        return None if isinstance(found, Absent | Broken | Unseen) else found

    def write(self, path: str, value: T, system: System) -> None:
        """Write a value to a file. Raises OSError."""
        write_record(system, path, self.render(value))


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    # The error has no location if the document contains half of a surrogate pair, which pydantic does not accept.
    name, *inner = first["loc"] or ("",)
    key = f"key {name}{''.join(f'[{part!a}]' for part in inner)}" if name else "the document"
    if first["type"].endswith("_type"):
        wanted = first["type"].removesuffix("_type")
        return f"{key} must be {PYDANTIC_TYPES.get(wanted, wanted)}, not {in_json(first['input'])}"
    return f"{key}: {first['msg']}"
