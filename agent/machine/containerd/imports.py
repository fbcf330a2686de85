"""Finds the files that containerd's main configuration file imports."""

import posixpath
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from agent.machine.containerd import files
from agent.machine.containerd.formats import MAIN
from agent.machine.containerd.tables import IMPORT, covers, imports
from agent.model.errors import DocumentError
from agent.system.files import System

SAME_IN_GO = r"([^\[\]\\]|\[([A-Za-z0-9_.]|[A-Za-z0-9]-[A-Za-z0-9])+\])*"
"""Matches the patterns that mean the same to fnmatch and to Go's filepath.Match, which negates with `[^` instead of
`[!`, and has backslashes as escapes."""


def loaded_files(system: System, main: bytes, drop_in: str) -> dict[str, bytes]:
    """Return the contents of the files that containerd imports, in the order of loading. Raises DocumentError, OSError.

    The order is breadth first, and each file is loaded once (LoadConfig in containerd's cmd/containerd/server/config).
    If an import covers the agent's drop-in, the result has the drop-in with empty content, whether it exists or not.
    """
    loaded: dict[str, bytes] = {}
    pending = list(parsed_imports(MAIN, main))
    while pending:
        pattern = pending.pop(0)
        matches = set(_glob(system, pattern)) if "*" in pattern else {pattern}
        if covers(pattern, drop_in):
            matches.add(drop_in)
        for path in sorted(matches - {MAIN, *loaded}):
            loaded[path] = b"" if path == drop_in else _load(system, path)
            pending += parsed_imports(path, loaded[path])
    return loaded


def new_import(system: System, main: bytes, drop_in: str, own: Iterable[str]) -> str:
    """Return the pattern by which the main file is to import the drop-in. Raises DocumentError or OSError.

    The pattern is IMPORT if IMPORT covers the drop-in, and matches only the agent's drop-ins and files that containerd
    already loads. `own` has the agent's other drop-ins. Otherwise, the pattern is the path of the drop-in with an
    asterisk before the suffix. The plain path is not used, because containerd does not start if a file that is imported
    by its plain path is missing.
    """
    loaded = loaded_files(system, main, drop_in)
    if covers(IMPORT, drop_in) and not {*_glob(system, IMPORT)} - {drop_in, *own, *loaded}:
        return IMPORT
    stem, suffix = posixpath.splitext(drop_in)
    return f"{stem}*{suffix}"


def parsed_imports(path: str, content: bytes) -> tuple[str, ...]:
    """Return a file's imports as absolute patterns. Raises DocumentError."""
    patterns = imports(path, files.parse(path, content))
    for pattern in patterns:
        if "*" in pattern and not re.fullmatch(SAME_IN_GO, pattern):
            raise DocumentError(
                f"{path}: key imports: the agent cannot read the pattern {pattern} as containerd does",
                "write it without a backslash, and with only letters, digits, dots and underscores in brackets",
            )
    return patterns


def _load(system: System, path: str) -> bytes:
    # The agent lists all imported files in a TOML file of its own (`_baseline` in agent.machine.containerd.configure),
    # and TOML can only have names in UTF-8.
    if any("\udc80" <= character <= "\udcff" for character in path):
        raise DocumentError(f"{path} is imported, but its name is not UTF-8", "rename it")
    content = files.read_optional(system, path)
    if content is None:
        raise DocumentError(f"{path} is imported, but does not exist", "create it, or remove its import")
    return content


def _glob(system: System, pattern: str) -> list[str]:
    """Return the paths that match a pattern, as Go's filepath.Glob does; there may be none."""
    paths = [""]
    for part in pattern.split("/")[1:]:
        wild = any(character in part for character in "*?[")
        directories = [each for each in paths if system.is_directory(each or "/")]
        names = {each: system.entries(each or "/") if wild else (part,) for each in directories}
        paths = [
            f"{each}/{name}" for each in directories for name in names[each] if not wild or fnmatchcase(name, part)
        ]
    return [path for path in paths if system.exists(path)]
