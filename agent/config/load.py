"""Loads the configuration, or the last good one while the current one is invalid."""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast, get_args, get_type_hints

import msgspec
from msgspec import Struct, convert, to_builtins
from msgspec.structs import fields

from agent import __version__
from agent.config.checks import Table
from agent.config.settings import GPUS_EXPECTED, Config
from agent.model.device import FileIdentity
from agent.model.errors import ConfigChangedError, ConfigError, DocumentError, NoMachinesError
from agent.model.json_document import parse_object, parse_toml
from agent.model.paths import CONFIG_DIRECTORY, CONFIG_FILE, LAST_GOOD_CONFIG, LAST_GOOD_LOCK, RUNTIME
from agent.model.text import printable
from agent.system.files import System
from agent.system.trust import settings_fault

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

LINE_LIMIT = 80
"""How much of a faulty line an error quotes at most, in characters."""
Keys = tuple[str, ...]
"""Identifies a key: the names of the tables around it, followed by its own."""
MACHINES_KEY: Keys = ("machines",)


class Document(Struct, frozen=True):
    """What the files of the configuration contain."""

    content: dict[str, Any]
    files: list[tuple[str, dict[str, Any]]]
    """The content of each file. Later files override earlier ones. Errors about a missing key name the last file,
    because the key can be added there."""

    def file_of(self, keys: Keys) -> str | None:
        """Return the last file that has the key; None if none has it."""
        for file, value in self.files[::-1]:
            found: object = value
            for key in keys:
                found = found.get(key) if isinstance(found, dict) else None
            if found is not None:
                return file
        return None


def read_document(system: System, path: str) -> Document:
    """Return the content of CONFIG_FILE, overridden by the files in CONFIG_DIRECTORY in the order of their names.

    If `path` is another file, return only its content. Raises ConfigError, or NoMachinesError if there is no file.
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
    document = Document({}, [])
    for file in files:
        try:
            # Only the standard files must belong to root: a user who passes --config is responsible for that file.
            if path == CONFIG_FILE and (fault := settings_fault(system, file)):
                raise ConfigError(f"{file}: refused, because it decides what root does on this host: {fault}")
            content = _parse(system.read(file), file)
            _merge(document.content, content)
        except OSError as error:
            raise ConfigError(f"{file}: cannot read it: {error.strerror}") from error
        document.files.append((file, content))
    return document


def _parse(data: bytes, file: str) -> dict[str, Any]:
    text = ""
    try:
        text = data.decode()
        return parse_toml(text)
    except ValueError as error:
        # Quote the line that the error names, without the value: it may be a secret that does not belong there, and
        # everyone can read the error.
        found, lines, source = re.search(r"at line ([0-9]{1,9})", str(error)), text.split("\n"), ""
        if found and int(found[1]) <= len(lines):
            key, equals, _ = lines[int(found[1]) - 1].strip()[:LINE_LIMIT].partition("=")
            source = f": {printable(key)}{equals and '= ...'}"
        raise ConfigError(f"{file}: not TOML: {error}{source}") from error


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Merge `new` into `into`: merge tables, replace other values."""
    for key, value in new.items():
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(into[key], value)
        else:
            into[key] = value


# Keeps the last good configuration in a file. It is the last configuration that was valid.
#
# The file has two parts: the document, which is what the configuration files contained, and the settings that the
# document's validation returned. If the current configuration is invalid, the service and starting machines use the
# saved document, because machines must start after a reboot of the host and keep their GPUs. If the current
# configuration files still contain the saved document, the saved settings are used, so that nothing has to be validated
# again.
#
# Every process that makes passes saves its configuration here. So other processes notice when a different configuration
# comes into force (InForce).


# Installing a package replaces the files in this directory, and so changes the directory's ctime.
INSTALLATION = f"{__version__} {os.stat(os.path.dirname(__file__)).st_ctime_ns}"
"""Identifies the code that this process runs. Settings that other code validated are not used, because this code might
reject their document."""


def save_last_good(document: dict[str, Any], config: Config, system: System) -> None:
    """Save the configuration as the last good one. Raises no error.

    If saving fails, remove the configuration that was saved before, unless it is the same.
    """
    # The document is saved too, because a later release may have other defaults: it validates the document again, and
    # does not use the settings.
    saved = {"validated_by": INSTALLATION, "document": document, "settings": to_builtins(config)}
    content = json.dumps(saved, default=str).encode() + b"\n"
    try:
        # At the first boot after an upgrade, the service and every starting machine save the same document. All use the
        # same temporary file, so only one of them may write. The others do not wait, because no machine's start may
        # wait for another process.
        system.make_directory(RUNTIME)
        lock = system.open_lock(LAST_GOOD_LOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not public, because the configuration files may be readable by root only.
            system.write(LAST_GOOD_CONFIG, content, 0o600)
        finally:
            os.close(lock)
    except OSError:
        # Remove a saved configuration that is outdated: it may grant what `config` no longer grants. A file can be
        # removed even from a full disk.
        with contextlib.suppress(OSError):
            if not _same(_saved(system), document):
                system.remove(LAST_GOOD_CONFIG)


class InForce(Struct):
    """Checks whether this process still works with the configuration in force: the one that any process saved last."""

    config: Config
    system: System
    checked: FileIdentity | None = None
    """The file's identity (`last_good_identity`) at the last check; before the first check, its identity from before
    `config` was read."""

    def check(self) -> None:
        """Raises ConfigChangedError, once after each change, if another process has put other settings in force.

        If the file is missing or damaged, the settings in force are unknown. No error is raised then, so that passes go
        on. If the file has not changed since `config` was read, no error is raised either, even if its settings differ
        from `config`: on a read-only file system, an outdated file can be neither replaced nor removed.
        """
        identity = last_good_identity(self.system)
        if identity is None or identity == self.checked:
            return
        settings = _settings(_saved(self.system))
        if settings is None:
            # Leave `checked` unchanged, so that the next check reads the file again: perhaps only this attempt failed.
            return
        self.checked = identity
        # Compare texts, because TOML has dates, times and NaN. If a date or time is saved as JSON, it is read again as
        # a string. NaN does not even equal itself.
        saved, own = (json.dumps(to_builtins(each), default=str, sort_keys=True) for each in (settings, self.config))
        if saved != own:
            raise ConfigChangedError("the configuration has changed in the meantime", "run the command again")


def last_good_identity(system: System) -> FileIdentity | None:
    """Return the identity of the last good configuration's file; None if there is none, or it cannot be read."""
    try:
        return system.identity(LAST_GOOD_CONFIG)
    except OSError:
        return None


def _saved(system: System) -> dict[str, Any]:
    """Return the file's content; empty if there is no file, or the file is damaged."""
    try:
        return parse_object(LAST_GOOD_CONFIG, system.read(LAST_GOOD_CONFIG))
    except (OSError, DocumentError):
        return {}


def _settings(saved: dict[str, Any]) -> Config | None:
    try:
        return convert(saved.get("settings"), Config)
    except (msgspec.ValidationError, UnicodeError):
        # JSON can have half a surrogate pair, for which msgspec raises UnicodeEncodeError.
        return None


def _same(saved: dict[str, Any], document: dict[str, Any]) -> bool:
    """Return whether the document is the saved one."""
    try:
        # Compare texts, because Python's 1, 1.0 and True are equal.
        return json.dumps(saved.get("document")) == json.dumps(document)
    except TypeError:
        # The document has a date or time of TOML, which JSON lacks. So it is validated again each time.
        return False


class Loaded(Struct, frozen=True):
    """The configuration to use."""

    config: Config
    rejected: str = ""
    """Why the files were rejected, if the last good configuration is used instead; otherwise empty."""
    in_force: bool = True
    """Whether `config` is the host's own configuration. If so, each pass checks that `config` is still in force
    (InForce). False, for example, if the user named another file (--config)."""
    before: FileIdentity | None = None
    """The identity that the last good configuration's file had before `config` was read (agent.config.load)."""


def load_config(system: System, path: str = CONFIG_FILE, *, save: bool = False) -> Config:
    """Return the validated configuration. If `path` is not CONFIG_FILE, read only that file.

    With `save`, the configuration becomes the last good one, but only if `path` is CONFIG_FILE.
    Raises ConfigError, which names the file and the key.
    """
    document, standard = read_document(system, path), path == CONFIG_FILE
    saved = _saved(system) if standard else {}
    if saved.get("validated_by") == INSTALLATION and _same(saved, document.content) and (known := _settings(saved)):
        return known
    config = _validate(document)
    if standard and save:
        save_last_good(document.content, config, system)
    return config


def load_or_last_good(system: System) -> Loaded:
    """Return the configuration and save it as the last good one; if it is invalid, return the last good one.

    Raises ConfigError if there is no usable last good one either. Raises NoMachinesError if there is no configuration
    file, or no file has a table of machines: in both cases, the last good one would bring back machines that were
    removed.
    """
    before = last_good_identity(system)
    try:
        return Loaded(load_config(system, save=True), before=before)
    except NoMachinesError:
        raise
    except ConfigError as error:
        try:
            # Validate it again: other code may have saved it.
            last_good = _validate(Document(_saved(system).get("document", {}), [(LAST_GOOD_CONFIG, {})]))
        except ConfigError:
            raise error from None
        return Loaded(last_good, str(error), before=before)


def _validate(document: Document) -> Config:
    """Return the configuration in a document. Raises ConfigError, which names the file and the key."""
    try:
        return Config.validated(document.content)
    except ValueError as error:
        # Not caught by its own name, because only a new document loads pydantic.
        errors = cast("ValidationError", error).errors()
        # Raise NoMachinesError only if nothing else is wrong: another mistake, such as a misspelt [machines], may be
        # the reason why there is no table of machines.
        no_machines = [(each["type"], each["loc"]) for each in errors] == [("missing", MACHINES_KEY)]
        raise (NoMachinesError if no_machines else ConfigError)(_error_lines(errors, document)) from error


def _error_lines(errors: Sequence["ErrorDetails"], document: Document) -> str:
    """Return pydantic's errors as `FILE: KEY: what is wrong`, one line per key."""
    found: dict[Keys, list[ErrorDetails]] = {}
    for each in errors:
        # pydantic adds the names of union members and "[key]" to the location. These are not keys in a file, so use
        # only the longest beginning of the location that is a key in a file.
        keys = tuple(str(part) for part in each["loc"])
        named = next((keys[:length] for length in range(len(keys), 0, -1) if document.file_of(keys[:length])), ())
        if each["type"] == "missing" or (each["type"] == "extra_forbidden" and named != keys):
            # The key is missing, or is an unknown one in a table that is in a list. No file has such keys, so name the
            # whole location.
            named = keys
        found.setdefault(named or keys, []).append(each)
    lines = []
    for keys, of_key in found.items():
        # Name the file that the key, or the innermost table around it, is from.
        files = (document.file_of(keys[:length]) for length in range(len(keys), 0, -1))
        file = next(filter(None, files), document.files[-1][0])
        lines.append(f"{file}: {'.'.join(keys)}: {_what_is_wrong(keys, of_key)}")
    return "\n".join(lines)


MESSAGES = {
    "missing": "is missing",
    "dict_type": "must be a table",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "int_type": "must be a whole number",
    "string_type": "must be a string",
}
"""What is wrong, by pydantic's type of error; for other types, pydantic's own message is used."""


def _what_is_wrong(keys: Keys, errors: Sequence["ErrorDetails"]) -> str:
    """Return what is wrong with a key. A key of which there are several types has an error for each."""
    types, first, value = {each["type"] for each in errors}, errors[0]["type"], errors[0]["input"]
    as_count = f', such as "count={value}"' if type(value) is int and value > 0 else ""
    if first == "missing" and keys == MACHINES_KEY:
        return "is missing; add a table [machines.NAME] for each machine, or an empty table [machines] for none"
    if first == "extra_forbidden" and keys[-1] == "count":
        return f'unknown key; write gpus = "count=N"{as_count}'
    if first == "extra_forbidden":
        known: type[Table] = Config
        for name in keys[:-1]:
            hints = get_type_hints(known)
            known = next(_tables(hints[name]), known) if name in hints else known
        close = get_close_matches(keys[-1], (each.name for each in fields(known)), cutoff=0.7)
        return f"unknown key; did you mean {' or '.join(close)}?" if close else "unknown key"
    if "string_type" in types and keys[-1] == "gpus":
        return f"{GPUS_EXPECTED}{as_count}"
    if {"string_type", "list_type"} <= types:
        return "must be a string or a list of strings"
    return MESSAGES.get(first) or errors[0]["msg"].removeprefix("Value error, ")


def _tables(hint: object) -> Iterator[type[Table]]:
    """Yield the tables that a type consists of."""
    if isinstance(hint, type) and issubclass(hint, Table):
        yield hint
    for each in get_args(hint):
        yield from _tables(each)
