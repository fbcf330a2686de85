"""Reads containerd's configuration files and writes ours, with the state before it at hand to go back to."""

import posixpath
import tomllib
from collections.abc import Mapping
from typing import Any

from agent.errors import DocumentError
from agent.inside.containerd import MAIN, Table, covers, imports
from agent.system import System

HEADER = "# Written by unbounded-agent at each change of the files before it; edits here are overwritten.\n"


def imported_files(system: System, main: Table, drop_in: str) -> tuple[str, ...]:
    """Files that the main file imports, in containerd's order, without ours."""
    found: list[str] = []
    for pattern in imports(main):
        directory = posixpath.dirname(pattern)
        if "*" not in pattern:
            found.append(pattern)
        elif system.is_directory(directory):
            found += [path for name in system.entries(directory) if covers(pattern, path := f"{directory}/{name}")]
    return tuple(path for path in dict.fromkeys(found) if path not in (drop_in, MAIN))


def parse(path: str, text: bytes) -> Table:
    """Raises DocumentError that names the file."""
    try:
        return tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentError(
            f"{path}: not TOML: {error}", "repair it: containerd cannot start with it either"
        ) from error


def read_optional(system: System, path: str) -> bytes | None:
    """A file's content; None when there is no such file."""
    try:
        return system.read(path)
    except FileNotFoundError:
        return None


def render_toml(table: Mapping[str, Any], header: str = "") -> bytes:
    """TOML text of plain data."""
    # Only here: importing it takes longer than a run that writes nothing.
    import tomlkit

    return (header + tomlkit.dumps(table)).encode()


def with_import(text: bytes, pattern: str) -> bytes:
    """The main file's text with one more import; comments and layout stay. Raises DocumentError."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(text.decode())
    except TOMLKitError as error:
        # Of what tomllib took: tomlkit bounds how deep a table's name may be.
        raise DocumentError(f"{MAIN}: cannot be edited: {error}", f'add imports = ["{pattern}"] to it') from error
    if "imports" not in document:
        # In front: at the end it would become a key of the last table.
        return f'imports = ["{pattern}"]\n'.encode() + text
    listed: Any = document["imports"]
    listed.append(pattern)
    return tomlkit.dumps(document).encode()


def restore(system: System, before: Mapping[str, bytes | None]) -> None:
    """Put files back as they were; None removes."""
    for path, content in before.items():
        if content is None:
            system.remove(path)
        elif read_optional(system, path) != content:
            system.write(path, content)
