"""Parses JSON documents with the standard library: those that the two halves exchange, and the host half's records.

The input is not trusted. Invalid input raises DocumentError, which names the document and, if one is wrong, the key.
Also renders the JSON that other programs read as YAML.
"""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from agent.model.errors import DocumentError

V = TypeVar("V")
JSON_TYPES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a whole number",
    float: "a decimal number",
    type(None): "null",
}
"""JSON's words for the types of parsed values: people who read an error have the document, not this code."""
NAME_SHOWN = 100
"""Characters of a name in a document that an error shows."""


def parse_object(where: str, data: bytes) -> dict[str, Any]:
    """Return the JSON object that a document consists of."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where}: not JSON: {error}") from error
    return require_object(where, value)


def json_for_yaml(document: object, *, sort_keys: bool = False) -> bytes:
    """Return a document as JSON that is also YAML: Go's readers of CDI specifications and kubeconfigs take it as YAML.

    In YAML, an escape must not be half of a surrogate pair, so characters above U+FFFF are not escaped. Characters from
    U+007F to U+FFFF are escaped: YAML forbids some of them, and takes U+0085 and U+2028 for line breaks.
    """
    text = json.dumps(document, indent=1, sort_keys=sort_keys, ensure_ascii=False)
    return re.sub("[\x7f-\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text).encode() + b"\n"


def require_object(where: str, value: object) -> dict[str, Any]:
    """Return the value, which must be a JSON object."""
    if not isinstance(value, dict):
        raise DocumentError(f"{where}: must be an object, not {in_json(value)}")
    return value


def in_json(value: object) -> str:
    """Return what JSON calls the type of a parsed value."""
    return _word(type(value))


def _word(kind: type) -> str:
    return JSON_TYPES.get(kind, kind.__name__)


def accept_version(where: str, document: dict[str, Any], accepted: tuple[int, ...]) -> None:
    """Raise DocumentError if the document's version is not in `accepted`: its keys may have other meanings."""
    version = get(where, document, "version", int)
    if version not in accepted:
        raise DocumentError(
            f"{where}: version {version} is unknown (this release knows {', '.join(map(str, accepted))})",
            "another release of the agent wrote it: use the same release on the host and in the image",
        )


def get(where: str, document: dict[str, Any], key: str, kind: type[V]) -> V:
    """Return the value at `key`, which must be of type `kind`. A bool does not count as an int."""
    if key not in document:
        raise DocumentError(f"{where}: key {key} is missing")
    value = document[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise DocumentError(f"{where}: key {key} must be {_word(kind)}, not {in_json(value)}")
    return value


def objects(where: str, document: dict[str, Any], key: str, parse: Callable[[str, dict[str, Any]], V]) -> tuple[V, ...]:
    """Return the results of `parse` for the objects in the list at `key`."""
    items = get(where, document, key, list)
    return tuple(
        parse(f"{where}: {key}[{index}]", require_object(f"{where}: {key}[{index}]", item))
        for index, item in enumerate(items)
    )


def mapping(where: str, document: dict[str, Any], key: str, kind: type[V]) -> dict[str, V]:
    """Return the object at `key`, whose values must all be of type `kind`."""
    found = get(where, document, key, dict)
    for name, value in found.items():
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            shown = f"{key}[{name[:NAME_SHOWN]!a}]"
            raise DocumentError(f"{where}: key {shown} must be {_word(kind)}, not {in_json(value)}")
    return found


def strings(where: str, document: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return the strings in the list at `key`."""
    items = get(where, document, key, list)
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise DocumentError(f"{where}: key {key}[{index}] must be a string, not {in_json(item)}")
    return tuple(items)


def timestamp(where: str, document: dict[str, Any], key: str) -> float:
    """Return the time at `key`. Raises DocumentError unless it is a number of seconds that can become a date."""
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 36:
        raise DocumentError(f"{where}: key {key} must be a time in seconds, not {str(value)[:40]!a}")
    return float(value)
