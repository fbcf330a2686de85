"""Validates a document of the configuration, and says what is wrong with it. Importing this loads pydantic."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import get_args, get_type_hints

from msgspec.structs import fields
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agent.config.checks import Table
from agent.config.load import Document
from agent.config.settings import GPUS_EXPECTED, Config
from agent.model.errors import ConfigError, NoMachinesError


def validate(document: Document) -> Config:
    """Return the configuration in a document. Raises ConfigError, which names the file and the key."""
    try:
        return Config.validated(document.content)
    except ValidationError as error:
        # Raise NoMachinesError only if nothing else is wrong: another mistake, such as a misspelt [machines], may be
        # the reason why there is no table of machines.
        no_machines = [(each["type"], each["loc"]) for each in error.errors()] == [("missing", MACHINES_KEY)]
        raise (NoMachinesError if no_machines else ConfigError)(_error_lines(error, document)) from error


def _error_lines(error: ValidationError, document: Document) -> str:
    """Return pydantic's errors as `FILE: KEY: what is wrong`, one line per key."""
    found: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for each in error.errors():
        # pydantic adds the names of union members and "[key]" to the location. These are not keys in a file, so use
        # only the longest beginning of the location that is a key in a file.
        keys = tuple(str(part) for part in each["loc"])
        named = next((keys[:length] for length in range(len(keys), 0, -1) if keys[:length] in document.origins), ())
        if each["type"] == "missing" or (each["type"] == "extra_forbidden" and named != keys):
            # The key is missing, or is an unknown one in a table that is in a list. Such keys are not in `origins`, so
            # name the whole location.
            named = keys
        found.setdefault(named or keys, []).append(each)
    return "\n".join(
        f"{_file(keys, document)}: {'.'.join(keys)}: {_what_is_wrong(keys, errors)}" for keys, errors in found.items()
    )


def _file(keys: tuple[str, ...], document: Document) -> str:
    """Return the file that a key, or the innermost table around it, is from."""
    lengths = range(len(keys), 0, -1)
    return next((file for each in lengths if (file := document.origins.get(keys[:each]))), document.file)


def _what_is_wrong(keys: tuple[str, ...], errors: Sequence[ErrorDetails]) -> str:
    """Return what is wrong with a key. A key of which there are several types has an error for each."""
    types, value = {each["type"] for each in errors}, errors[0]["input"]
    first = errors[0]["type"]
    if first == "missing" and errors[0]["loc"] == MACHINES_KEY:
        return "is missing; add a table [machines.NAME] for each machine, or an empty table [machines] for none"
    if first == "extra_forbidden":
        return f"unknown key{_meant(keys, value)}"
    if "string_type" in types and keys[-1] == "gpus":
        return f"{GPUS_EXPECTED}{_as_count(value)}"
    if {"string_type", "list_type"} <= types:
        return "must be a string or a list of strings"
    return MESSAGES.get(first) or errors[0]["msg"].removeprefix("Value error, ")


def _meant(keys: tuple[str, ...], value: object) -> str:
    """Return what an unknown key may have been meant for, to be added to the error; empty if that is not known."""
    *tables, key = keys
    if key == "count":
        return f'; write gpus = "count=N"{_as_count(value)}'
    known: type[Table] = Config
    for name in tables:
        hints = get_type_hints(known)
        known = next(_tables(hints[name]), known) if name in hints else known
    close = get_close_matches(key, (each.name for each in fields(known)), cutoff=0.7)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _tables(hint: object) -> Iterator[type[Table]]:
    """Yield the tables that a type consists of."""
    if isinstance(hint, type) and issubclass(hint, Table):
        yield hint
    for each in get_args(hint):
        yield from _tables(each)


def _as_count(value: object) -> str:
    return f', such as "count={value}"' if type(value) is int and value > 0 else ""


MESSAGES = {
    "extra_forbidden": "unknown key",
    "missing": "is missing",
    "dict_type": "must be a table",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "int_type": "must be a whole number",
    "string_type": "must be a string",
}
"""What is wrong, by pydantic's type of error; for other types, pydantic's own message is used."""

MACHINES_KEY = ("machines",)
