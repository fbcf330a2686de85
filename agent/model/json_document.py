"""Parses TOML and JSON with the standard library, such as the documents that the two halves exchange.

The input is not trusted. Invalid input raises DocumentError, which names the document and, if one is wrong, the key.
Also renders the JSON that other programs read as YAML.
"""

import json
import re
import tomllib
from collections.abc import Callable, Hashable, Mapping
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

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
LEVELS = 100
"""The deepest nesting of a document: whatever handles a value may recurse."""
PARTS = 100
"""The largest number of parts in a dotted key. The time that tomllib takes grows with the square of that number: a key
of 1 MiB takes minutes. No known configuration has a key with more than ten parts."""
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
# The lookbehind makes the search start only once in each word. Otherwise, the time for a long word would grow with the
# square of its length.
LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:\.[ \t]*+{_PART}){{{PARTS}}}")


def decoded(loads: Callable[[Any], Any], data: object) -> Any:  # noqa: ANN401
    """Return what `loads` makes of a document. Raises ValueError for any that is invalid, or nested too deeply."""
    try:
        value = loads(data)
    except RecursionError as error:
        raise ValueError(f"nested too deeply: {error}") from error
    level = [value]
    for _ in range(LEVELS):
        lists = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [child for each in lists for child in each]
    if level:
        raise ValueError(f"nested too deeply: it has more than {LEVELS} levels")
    return value


def parse_json(data: bytes | str) -> Any:  # noqa: ANN401
    """Return what a JSON document has. Raises ValueError for any that is invalid, or nested too deeply."""
    return decoded(json.loads, data)


def parse_toml(text: str) -> dict[str, Any]:
    """Return the document. Raises ValueError for any that is invalid, or nested too deeply."""
    if LONG_KEY.search(text):
        raise ValueError(f"nested too deeply: a key has more than {PARTS} parts")
    return decoded(tomllib.loads, text)  # type: ignore[no-any-return]


def parse_object(where: str, data: bytes) -> dict[str, Any]:
    """Return the JSON object that a document consists of."""
    try:
        value = parse_json(data)
    except ValueError as error:
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
    return JSON_TYPES.get(type(value), type(value).__name__)


def _expected(where: str, key: str, value: object, kind: type[V]) -> V:
    """Return the value at a key, which must be of type `kind`. A whole number is also a float; a boolean is neither."""
    if type(value) is kind or (kind is float and type(value) is int):
        return cast(V, value)
    wanted = "a number" if kind is float else JSON_TYPES.get(kind, kind.__name__)
    raise DocumentError(f"{where}: key {key} must be {wanted}, not {in_json(value)}")


HOST, IMAGE = "on the host", "in the machine's image"
"""Where an agent is that writes or reads a document."""


def accept_version(where: str, document: dict[str, Any], known: int, writer: str = HOST, reader: str = HOST) -> None:
    """Raise DocumentError if the document has another version than the known one: its keys may have other meanings."""
    version = get(where, document, "version", int)
    if version != known:
        raise DocumentError(
            f"{where}: version {version} is unknown (this release knows {known})",
            f"a newer release of the agent wrote it: upgrade the agent {reader}"
            if version > known
            else f"an older release of the agent wrote it: upgrade the agent {writer}",
        )


def get(where: str, document: dict[str, Any], key: str, kind: type[V]) -> V:
    """Return the value at `key`, which must be of type `kind`."""
    if key not in document:
        raise DocumentError(f"{where}: key {key} is missing")
    return _expected(where, key, document[key], kind)


def objects(where: str, document: dict[str, Any], key: str, parse: Callable[[str, dict[str, Any]], V]) -> tuple[V, ...]:
    """Return the results of `parse` for the objects in the list at `key`."""
    items = ((f"{where}: {key}[{index}]", item) for index, item in enumerate(get(where, document, key, list)))
    return tuple(parse(place, require_object(place, item)) for place, item in items)


def strings(where: str, document: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return the strings in the list at `key`."""
    items = get(where, document, key, list)
    return tuple(_expected(where, f"{key}[{index}]", item, str) for index, item in enumerate(items))


class Form(NamedTuple):
    """A condition for a value beyond its type, as the annotation `Annotated[str, Form("a name", NAME.fullmatch)]`."""

    words: str
    """What the value must be, for errors."""
    holds: Callable[[Any], object]
    """Returns a true value if a value of the type is accepted."""


TIME = Form("a time in seconds", lambda value: 0 <= value < 1 << 36)
Seconds = Annotated[float, TIME]
"""A time in seconds since the epoch that can become a date."""


def render_document(version: int, content: object) -> bytes:
    """Return the document that has these contents, a named tuple, and this version."""
    return json.dumps({"version": version, **plain(content)}, indent=1).encode() + b"\n"


def parse_document(where: str, data: bytes, kind: type[V], version: int, writer: str = IMAGE, reader: str = IMAGE) -> V:
    """Return the contents of a document that `render_document` made. Raises DocumentError, which names the key."""
    document = parse_object(where, data)
    accept_version(where, document, version, writer, reader)
    return decode(where, document, kind)


def plain(value: object) -> Any:  # noqa: ANN401 - JSON
    """Return a value as `json.dumps` accepts it: a named tuple is an object with the names of its fields."""
    match value:
        case tuple() if fields := getattr(value, "_fields", None):
            return {name: plain(each) for name, each in zip(fields, value, strict=True)}
        case tuple() | list():
            return [plain(each) for each in value]
        case dict():
            return {name: plain(each) for name, each in value.items()}
        case _:
            return value


def decode(where: str, document: dict[str, Any], kind: type[V]) -> V:
    """Return the named tuple of this class that a parsed document has; the reverse of `plain`.

    The annotations of the class's fields say what each key must be, and keys of fields with a default may be missing.
    Unknown keys are ignored. Annotations may be types of JSON, StrEnum, named tuples, `tuple[T, ...]`, `dict[str, T]`,
    Mapping, and each of these with a Form.
    """
    values = {}
    for name, (decoder, required) in _fields(cast(Hashable, kind)).items():
        if name in document:
            values[name] = decoder(where, name, document[name])
        elif required:
            raise DocumentError(f"{where}: key {name} is missing")
    return kind(**values)


Decoder = Callable[[str, str, Any], Any]
"""Returns the value that a document has at a key. The parameters are the document's name, the key, and parsed JSON."""


@cache
def _fields(kind: Any) -> dict[str, tuple[Decoder, bool]]:  # noqa: ANN401
    defaults: dict[str, object] = getattr(kind, "_field_defaults", {})
    hints = get_type_hints(kind, include_extras=True)
    return {name: (_decoder(hint), name not in defaults) for name, hint in hints.items()}


def _decoder(hint: Any) -> Decoder:  # noqa: ANN401 - an annotation
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _formed(_decoder(arguments[0]), arguments[1])
    if origin is tuple:
        item = _decoder(arguments[0])
        return lambda where, key, value: tuple(
            item(where, f"{key}[{index}]", each) for index, each in enumerate(_expected(where, key, value, list))
        )
    if origin in (dict, Mapping):
        item = _decoder(arguments[1])
        return lambda where, key, value: {
            name: item(where, f"{key}[{name[:NAME_SHOWN]!a}]", each)
            for name, each in _expected(where, key, value, dict).items()
        }
    if hasattr(hint, "_fields"):
        return lambda where, key, value: decode(f"{where}: {key}", require_object(f"{where}: {key}", value), hint)
    if issubclass(hint, StrEnum):
        words = Form(f"one of {', '.join(map(repr, map(str, hint)))}", {*map(str, hint)}.__contains__)
        valid = _formed(_decoder(str), words)
        return lambda where, key, value: hint(valid(where, key, value))
    return lambda where, key, value: _expected(where, key, value, hint)


def _formed(decoder: Decoder, form: Form) -> Decoder:
    def formed(where: str, key: str, value: object) -> object:
        found = decoder(where, key, value)
        if not form.holds(found):
            raise DocumentError(f"{where}: key {key} must be {form.words}, not {str(value)[:80]!a}")
        return found

    return formed
