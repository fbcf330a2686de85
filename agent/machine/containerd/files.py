"""Reads and writes containerd's configuration files."""

import errno
import re
from collections.abc import Mapping
from typing import Any

from agent.machine.containerd.formats import MAIN
from agent.machine.containerd.nested import Table
from agent.machine.containerd.tables import imports
from agent.model.errors import DocumentError
from agent.model.toml_document import parse_toml
from agent.system.files import System
from agent.vendors.machine_vendor import EDIT_LIMIT

DUMP_MIGRATES = (2, 0, 6)
"""The first containerd 2 whose `config dump` prints the configuration that the daemon uses (see effective_config)."""
TOKENS = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?\"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|\#[^\n]*"""
    r"|(?P<line>^[ \t]*\[)|(?P<open>[\[{])|(?P<close>[\]}])",
    re.DOTALL | re.MULTILINE,
)
"""Strings, comments and brackets of TOML (toml.io/en/v1.0.0). A multi-line string may end in five quotation marks."""
VENDOR, LOCAL = "/usr/", "/usr/local/"
"""Where packages have files that are not meant to be edited; and where, below that, administrators have theirs."""
UNWRITABLE = (errno.EROFS, errno.EBUSY, errno.EPERM, errno.EACCES)
"""Errors for a file that cannot be replaced: it is on a read-only file system, is itself a mount, is immutable, or is
on a network file system on which root has no rights."""
# After an upgrade, a drop-in may still have an earlier header: it is rewritten only if its tables differ.
HEADER = "# Written by unbounded-agent whenever containerd's other files change; edits here are overwritten.\n"


def effective_config(system: System, main: str, version: tuple[int, ...]) -> Table:
    """Return containerd's effective configuration for a main file and its imports, including defaults.

    Raises CommandError or DocumentError.
    """
    # From 2.0.0 to 2.0.5, `dump` prints defaults instead of the tables of a version 2 file. `migrate` prints what the
    # daemon uses (cmd/containerd/command/config.go; `server.New` in cmd/containerd/server/server.go).
    verb = "migrate" if (2, 0, 0) <= version < DUMP_MIGRATES else "dump"
    text = system.run("containerd", "--config", main, "config", verb)
    return parse(main, text.encode(errors="surrogateescape"))


def parse(path: str, text: bytes) -> Table:
    """Parse TOML. Raises DocumentError, which names the file."""
    try:
        return parse_toml(text.decode())
    except RecursionError as error:
        raise DocumentError(f"{path}: nested too deeply: {error}", "nest its tables less deeply") from error
    # The text is not TOML or UTF-8, or has a number with more digits than int() accepts.
    except ValueError as error:
        raise DocumentError(
            f"{path}: not TOML: {error}", "repair it: containerd cannot start with it either"
        ) from error


def read_optional(system: System, path: str) -> bytes | None:
    """Return a file's content; None if the file does not exist. Raises OSError."""
    try:
        return system.read(path)
    except FileNotFoundError:
        return None


def render_toml(table: Mapping[str, Any], header: str = "") -> bytes:
    """Return plain data as TOML text. Raises DocumentError."""
    # Imported here: the import takes longer than a run that writes nothing.
    import tomlkit

    try:
        return (header + tomlkit.dumps(table)).encode()
    except RecursionError as error:
        raise DocumentError(
            f"{MAIN}, or what it imports, cannot be edited: its tables are nested too deeply", "repair it"
        ) from error


def with_import(text: bytes, pattern: str) -> bytes:
    """Return the main file's text with one more import. Comments and layout stay. Raises DocumentError."""
    document = parse(MAIN, text)
    if "imports" not in document:
        # Added at the start, because at the end `imports` would become a key of the last table.
        return f'imports = ["{pattern}"]\n'.encode() + text
    # Raises DocumentError if `imports` is not a list.
    imports(MAIN, document)
    document["imports"] = [*document["imports"], pattern]
    try:
        edited = _append_import(text.decode(), pattern).encode()
        if parse(MAIN, edited) == document:
            return edited
        why = "the edit would change more than its imports"
    # Any exception, because tomlkit raises exceptions of its own, and a file that containerd reads must stay intact.
    except Exception as error:
        why = str(error)
    raise DocumentError(f"{MAIN}: cannot be edited: {why}", f'add "{pattern}" to its list `imports`')


def _append_import(text: str, pattern: str) -> str:
    import tomlkit

    # Top-level keys come before the first table. tomlkit must not parse the rest: it rejects some orders of
    # tables that containerd accepts.
    head = _before_tables(text)
    if len(head) > EDIT_LIMIT:
        raise DocumentError(f"{len(head)} characters precede its first table, but the agent edits at most {EDIT_LIMIT}")
    listing = tomlkit.parse(head)
    listed: Any = listing["imports"]
    listed.append(pattern)
    return tomlkit.dumps(listing) + text.removeprefix(head)


def _before_tables(text: str) -> str:
    """Return the text before the header of the first table.

    A header is a line that begins with a bracket, outside lists and strings. The text must be valid TOML, in which
    every string and list ends. The search takes linear time, whatever the text contains.
    """
    depth = 0
    for token in TOKENS.finditer(text):
        match token.lastgroup:
            case "line" if not depth:
                return text[: token.start()]
            case "line" | "open":
                depth += 1
            case "close":
                depth -= 1
            case _:
                pass
    return text


def put(system: System, files: Mapping[str, bytes | None]) -> None:
    """In the order of `files`, write each file whose content differs, and remove each file whose content is None."""
    for path, content in files.items():
        if content is None:
            system.remove(path)
        elif read_optional(system, path) != content:
            write(system, path, content)


def write(system: System, path: str, content: bytes, mode: int = 0o600) -> None:
    """Write a file and keep its mode. If the path is a link, write the file that the link leads to.

    `mode` is the mode of a new file. By default, only root may read a new file, because it may contain passwords of
    registries. A link is replaced by a file if it leads to a package's file (VENDOR), or to one that cannot be
    replaced.
    """
    place = path
    if system.exists(path):
        mode = system.mode(path)
        if system.read_link(path) is not None:
            real = system.real_path(path)
            place = real if real.startswith(LOCAL) or not real.startswith(VENDOR) else path
    try:
        system.write(place, content, mode)
    except OSError as error:
        if place == path or error.errno not in UNWRITABLE:
            raise
        system.write(path, content, mode)
