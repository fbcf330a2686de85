"""Reads config.toml, then config.d/*.toml in the order of their names, and merges them into one document.

A later file overrides what earlier ones have.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from agent.model.errors import ConfigError, NoMachinesError
from agent.model.paths import CONFIG_DIRECTORY, CONFIG_FILE
from agent.model.text import printable
from agent.model.toml_document import parse_toml
from agent.system.files import System
from agent.system.path_trust import settings_fault

LINE_LIMIT = 80
"""How much of a faulty line an error quotes at most, in characters."""


class Document(Struct, frozen=True):
    """What the files of the configuration contain."""

    content: dict[str, Any]
    origins: dict[tuple[str, ...], str]
    """The file that each key is from. A key is identified by the names of the tables around it, followed by its own."""
    file: str
    """The last file that was read. Errors about a missing key name this file, because the key can be added there."""


def read_document(system: System, path: str) -> Document:
    """Return the content of CONFIG_FILE and the files in CONFIG_DIRECTORY; if `path` is another file, only its content.

    Raises ConfigError, or NoMachinesError if there is no file.
    """
    try:
        files = [path] if system.exists(path) else []
        if path == CONFIG_FILE and system.exists(CONFIG_DIRECTORY):
            # Leave out hidden files. Editors make such files, and so do programs that are still writing a file.
            names = [name for name in system.entries(CONFIG_DIRECTORY) if not name.startswith(".")]
            files += [f"{CONFIG_DIRECTORY}/{name}" for name in names if name.endswith(".toml")]
    except OSError as error:
        # A file that cannot be read must not count as absent: the machines in it would no longer be configured.
        raise ConfigError(f"cannot read {path} or {CONFIG_DIRECTORY}: {error.strerror}") from error
    if not files:
        raise NoMachinesError(
            f"{path}: no such file",
            "create it with a table [machines.NAME] for each machine, or with an empty table [machines] for none",
        )
    document = Document({}, {}, files[-1])
    for file in files:
        try:
            # Only the standard files must belong to root: a user who passes --config is responsible for that file.
            content = _parse(system, file, root_owned=path == CONFIG_FILE)
            _merge(document.content, content, file, document.origins, ())
        except RecursionError as error:
            raise ConfigError(f"{file}: tables or lists are nested too deeply", "nest them less deeply") from error
    return document


def _parse(system: System, file: str, *, root_owned: bool) -> dict[str, Any]:
    try:
        if root_owned and (fault := settings_fault(system, file)):
            raise ConfigError(f"{file}: refused, because it decides what root does on this host: {fault}")
        text = system.read(file).decode()
    except OSError as error:
        raise ConfigError(f"{file}: cannot read it: {error.strerror}") from error
    except UnicodeError as error:
        raise ConfigError(f"{file}: not TOML: {error}") from error
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{file}: not TOML: {error}{_source(text, error)}") from error


def _source(text: str, error: ValueError) -> str:
    """Return the line that the error names, to be added to it; empty if it names none.

    The value is left out: it may be a secret that does not belong there, and everyone can read the error.
    """
    found = re.search(r"at line ([0-9]{1,9})", str(error))
    lines = text.split("\n")
    if not found or int(found[1]) > len(lines):
        return ""
    key, equals, _ = lines[int(found[1]) - 1].strip()[:LINE_LIMIT].partition("=")
    return f": {printable(key)}{equals and '= ...'}"


def _merge(
    into: dict[str, Any],
    new: Mapping[str, Any],
    file: str,
    origins: dict[tuple[str, ...], str],
    parents: tuple[str, ...],
) -> None:
    """Merge `new` into `into`: merge tables, replace other values. Record in `origins` which file each key is from.

    `parents` are the keys that lead to `new` from the top of the document.
    """
    for key, value in new.items():
        origins[(*parents, key)] = file
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, file, origins, (*parents, key))
        elif isinstance(value, dict):
            into[key] = {}
            _merge(into[key], value, file, origins, (*parents, key))
        else:
            into[key] = value
