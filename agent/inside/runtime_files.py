"""Reads containerd's configuration files and writes ours, with the state before it at hand to go back to."""

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from agent.errors import DocumentError
from agent.inside.containerd import MAIN, Table, covers, imports
from agent.system.files import System

HEADER = "# Written by unbounded-agent at each change of the files before it; edits here are overwritten.\n"


def loaded_files(system: System, main: Table, drop_in: str) -> dict[str, Table]:
    """Files that containerd loads by imports, in its order, with ours among them (empty) where it is covered.

    Breadth first, each once (LoadConfig in containerd's cmd/containerd/server/config). Raises DocumentError.
    """
    loaded: dict[str, Table] = {}
    pending = list(imports(MAIN, main))
    while pending:
        pattern = pending.pop(0)
        matches = set(_glob(system, pattern)) if "*" in pattern else {pattern}
        if covers(pattern, drop_in):
            matches.add(drop_in)
        for path in sorted(matches - {MAIN, *loaded}):
            loaded[path] = {} if path == drop_in else _load(system, path)
            pending += imports(path, loaded[path])
    return loaded


def _load(system: System, path: str) -> Table:
    content = read_optional(system, path)
    if content is None:
        raise DocumentError(f"{path}, which is imported, is not there", f"make it, or take its import out of {MAIN}")
    return parse(path, content)


def _glob(system: System, pattern: str) -> list[str]:
    """Paths by a pattern of Go's filepath.Glob; what matches nothing is no error."""
    found = [""]
    for part in pattern.split("/")[1:]:
        wild = any(character in part for character in "*?[")
        directories = [each for each in found if system.is_directory(each or "/")]
        names = {each: system.entries(each or "/") if wild else (part,) for each in directories}
        found = [
            f"{each}/{name}" for each in directories for name in names[each] if not wild or fnmatchcase(name, part)
        ]
    return [path for path in found if system.exists(path)]


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


def put(system: System, files: Mapping[str, bytes | None]) -> None:
    """Write what differs, in this order; None removes."""
    for path, content in files.items():
        if content is None:
            system.remove(path)
        elif read_optional(system, path) != content:
            write(system, path, content)


def write(system: System, path: str, content: bytes) -> None:
    """As readable as the file was. A new one only for root: it may repeat passwords of the main file's registries."""
    system.write(path, content, system.mode(path) if system.exists(path) else 0o600)
