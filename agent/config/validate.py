"""Validates a document of the configuration, and says what is wrong with it. Importing this loads pydantic."""

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agent.config.document import Document
from agent.config.settings import Config
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


def validate_again(content: object) -> Config | None:
    """Return the configuration in a document's content, which was valid once; None if it is no longer valid."""
    try:
        return Config.validated(content)
    except ValidationError:
        return None


def _error_lines(error: ValidationError, document: Document) -> str:
    """Return pydantic's errors as `FILE: KEY: what is wrong`, one line per key."""
    sentences: dict[tuple[str, ...], str] = {}
    for each in error.errors():
        # pydantic adds the names of union members and "[key]" to the location. These are not keys in a file, so use
        # only the longest beginning of the location that is a key in a file.
        keys = tuple(str(part) for part in each["loc"])
        named = next((keys[:length] for length in range(len(keys), 0, -1) if keys[:length] in document.origins), ())
        file = document.origins.get(named, document.file)
        if each["type"] == "missing" or (each["type"] == "extra_forbidden" and named != keys):
            # The key is missing, or is an unknown one in a table that is in a list. Such keys are not in `origins`, so
            # name the whole location.
            named = keys
        sentences.setdefault(named, f"{file}: {'.'.join(named or keys)}: {_what_is_wrong(each)}")
    return "\n".join(sentences.values())


def _what_is_wrong(error: ErrorDetails) -> str:
    if error["type"] == "missing" and error["loc"] == MACHINES_KEY:
        return "is missing; add a table [machines.NAME] for each machine, or an empty table [machines] for none"
    return MESSAGES.get(error["type"]) or error["msg"].removeprefix("Value error, ")


MESSAGES = {
    "extra_forbidden": "unknown key",
    "missing": "is missing",
    "dict_type": "must be a table",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "int_type": "must be a whole number",
    "string_type": "must be a string (some keys also accept a list of strings)",
}
"""What is wrong, by pydantic's type of error; for other types, pydantic's own message is used."""

MACHINES_KEY = ("machines",)
