"""Keeps the last good configuration, which is the last valid one, in a file.

The file has the document, and the settings that its validation returned. While the current configuration is invalid,
the service and starting machines use the document, because machines must start after a reboot of the host and keep
their GPUs. While the current configuration is the same document, the settings are used, and nothing is validated again.
Every process that makes passes saves its configuration here, so that the others notice which one is in force.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any

from msgspec import Struct, ValidationError, convert, to_builtins

from agent import __version__
from agent.config.settings import Config
from agent.model.device import FileIdentity
from agent.model.errors import ConfigChangedError, DocumentError
from agent.model.json_document import parse_object
from agent.model.paths import LAST_GOOD_CONFIG, LAST_GOOD_LOCK, RUNTIME
from agent.system.files import System


def _installation() -> str:
    try:
        # Installing a package replaces the files in this directory, which changes its ctime.
        return f"{__version__} {os.stat(os.path.dirname(__file__)).st_ctime_ns}"
    except OSError:
        return ""


INSTALLATION = _installation()
"""Identifies the code that this process runs: other code may not accept a document that this code accepts. Empty if
unknown."""


def last_good_document(system: System) -> object:
    """Return the last good document, or an empty one if none is saved. The caller must validate it again."""
    saved = _saved(system)
    # Earlier releases saved only the document.
    return saved.get("document", saved)


def known_settings(document: dict[str, Any], system: System) -> Config | None:
    """Return the settings in a document if it is the last good one, and this installation validated it; else None."""
    saved = _saved(system)
    known = bool(INSTALLATION) and saved.get("validated_by") == INSTALLATION and _same(saved, document)
    return _settings(saved) if known else None


def save_last_good(document: dict[str, Any], config: Config, system: System) -> None:
    """Save the configuration as the last good one. If that fails, remove one that differs. Raises no error."""
    # A later release validates the document, not the settings, because it may have other defaults.
    saved = {"validated_by": INSTALLATION, "document": document, "settings": to_builtins(config)}
    content = json.dumps(saved, default=str).encode() + b"\n"
    try:
        with _only_writer(system):
            # Not public, because the configuration files may be readable by root only.
            system.write(LAST_GOOD_CONFIG, content, 0o600)
    except OSError:
        # Better no copy than an outdated one, which may grant what this configuration no longer grants. A file can be
        # removed even from a full disk.
        with contextlib.suppress(OSError):
            if not _same(_saved(system), document):
                system.remove(LAST_GOOD_CONFIG)


class InForce(Struct):
    """Checks whether a process still works with the configuration in force, which is the one saved last."""

    config: Config
    system: System
    checked: FileIdentity | None = None
    """The identity that the file had at the last check, or before `config` was read (`last_good_identity`)."""

    def check(self) -> None:
        """Raises ConfigChangedError, once after each change, if another process has put other settings in force.

        A missing or damaged file says nothing about that, so it raises no error, and stops no pass. Nor does one that
        is older than `config`: if a file system is read-only, it can be neither replaced nor removed.
        """
        identity = last_good_identity(self.system)
        if identity is None or identity == self.checked:
            return
        settings = _settings(_saved(self.system))
        if settings is None:
            # Read it again at the next check: perhaps only this attempt failed.
            return
        self.checked = identity
        if _compared(settings) != _compared(self.config):
            raise ConfigChangedError("the configuration has changed in the meantime", "run the command again")


def last_good_identity(system: System) -> FileIdentity | None:
    """Return the identity of the last good configuration's file; None if there is none, or it cannot be read."""
    try:
        return system.identity(LAST_GOOD_CONFIG)
    except OSError:
        return None


def _compared(config: Config) -> str:
    """Return a text that is the same for the same settings, whether or not they have been saved in between.

    TOML has dates, times and NaN: JSON saves a date as a string, and NaN does not equal itself.
    """
    return json.dumps(to_builtins(config), default=str, sort_keys=True)


def _settings(saved: dict[str, Any]) -> Config | None:
    try:
        return convert(saved.get("settings"), Config)
    except (ValidationError, UnicodeError):
        # JSON can have half a surrogate pair, for which msgspec raises UnicodeEncodeError.
        return None


@contextlib.contextmanager
def _only_writer(system: System) -> Iterator[None]:
    """Keep other processes from writing the file. Raises OSError at once if one writes it now.

    At the first boot after an upgrade, the service and every starting machine save the same document. All use the same
    temporary file, and no machine's start may wait for another process.
    """
    system.make_directory(RUNTIME)
    descriptor = system.open_lock(LAST_GOOD_LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _saved(system: System) -> dict[str, Any]:
    """Return the file's content; empty if there is none or it is damaged."""
    try:
        return parse_object(LAST_GOOD_CONFIG, system.read(LAST_GOOD_CONFIG))
    except (OSError, DocumentError):
        return {}


def _same(saved: dict[str, Any], document: dict[str, Any]) -> bool:
    """Return whether the document is the saved one."""
    try:
        # Compare texts, because Python's 1, 1.0 and True are equal.
        return json.dumps(saved.get("document")) == json.dumps(document)
    except TypeError:
        # TOML has dates and times, which JSON lacks.
        return False
