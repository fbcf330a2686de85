"""Reads JSON into values of given types with msgspec, for the host half: machines have no msgspec. Pure.

The input is not trusted. Invalid input raises DocumentError, which names the document and, if one is wrong, the key.
"""

import json
import re
from base64 import b64decode, urlsafe_b64encode
from typing import Any, Generic, TypeVar

import msgspec

from agent.model.errors import DocumentError
from agent.model.json_document import JSON_TYPES, NAME_SHOWN, accept_version

T = TypeVar("T")
TYPES = {kind.__name__: words for kind, words in JSON_TYPES.items()} | {
    "object": "an object",
    "array": "a list",
    "float": "a number",
}
"""The words for the types in msgspec's errors."""
# Patterns for msgspec's errors. They are compiled at an error only, not at each start.
EXPECTED = r"Expected `([^`]+)`(.*?)(?:, got `(\w+)`)?"
FIELD = r"(?s)Object (?:missing required|contains (unknown)) field `(.*)`"


class Format(Generic[T]):
    """The format of a JSON document that has an object of type T."""

    def __init__(self, kind: type[T], version: int | None = None, *, advice: str = "") -> None:
        """Without a version, the document has no key for it. Messages about a damaged document end with `advice`."""
        self.kind, self._version, self._advice = kind, version, advice

    def render(self, value: T) -> bytes:
        version = {"version": self._version} if self._version else {}
        return json.dumps({**version, **to_builtins(value)}, indent=1).encode() + b"\n"

    def parse(self, where: str, data: bytes) -> T:
        """Return the value in a document. Raises DocumentError, which names the key if one is wrong."""
        try:
            document = decode(where, data, dict[str, Any])
            if self._version:
                accept_version(where, document, self._version)
                del document["version"]
            return convert(where, document, self.kind)
        except DocumentError as error:
            raise DocumentError(error.message, self._advice or error.hint) from error


class Base64(bytes):
    """Bytes that are base64url in JSON (RFC 4648, section 5)."""


def decode(where: str, data: bytes, kind: type[T]) -> T:
    """Return the value in a JSON document."""
    try:
        # Decoded here, because msgspec does not look at the encoding of strings that it skips.
        return msgspec.json.decode(data.decode(), type=kind)
    except msgspec.ValidationError as error:
        raise DocumentError(f"{where}: {_sentence(error)}") from error
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where}: not JSON: {error}") from error


def convert(where: str, document: dict[str, Any], kind: type[T]) -> T:
    """Return the value in a parsed document."""
    try:
        return msgspec.convert(document, kind, dec_hook=_from_text)
    except msgspec.ValidationError as error:
        raise DocumentError(f"{where}: {_sentence(error)}") from error


def to_builtins(value: object) -> Any:  # noqa: ANN401
    """Return the value as `json.dumps` accepts it."""
    return msgspec.to_builtins(value, enc_hook=_to_text)


def _from_text(kind: type, value: object) -> object:
    if kind is not Base64 or not isinstance(value, str):
        raise ValueError("must be a string in base64url")
    return Base64(b64decode(value, b"-_", validate=True))


def _to_text(value: object) -> str:
    if not isinstance(value, Base64):
        raise TypeError(f"no JSON for {type(value).__name__}")
    return urlsafe_b64encode(value).decode()


def _sentence(error: msgspec.ValidationError) -> str:
    """Return msgspec's error in the words of agent.model.json_document: short printable ASCII, whatever it quotes.

    A key of a mapping is `[...]`.
    """
    what, found, path = str(error).rpartition(" - at `$")
    what, path = (what, path.removesuffix("`")) if found else (str(error), "")
    key = f"key {path.removeprefix('.')}" if path else "the document"
    if match := re.fullmatch(EXPECTED, what):
        expected, limit, got = match.groups()
        wanted = " or ".join(TYPES.get(each, each) for each in expected.split(" | "))
        return f"{key} must be {wanted}{limit}" + (f", not {TYPES.get(got, got)}" if got else "")
    if match := re.fullmatch(FIELD, what):
        unknown, name = match.groups()
        field = f"{path}.{_visible(name[:NAME_SHOWN])}".removeprefix(".")
        return f"key {field} is {'unknown' if unknown else 'missing'}"
    return f"{key}: {_visible(what[: 2 * NAME_SHOWN])}".replace("Invalid enum value", "unknown value")


def _visible(text: str) -> str:
    return "".join(each if " " <= each <= "~" else ascii(each)[1:-1] for each in text)
