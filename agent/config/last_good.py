"""Keeps the last good configuration in a file. It is the last configuration that was valid.

The file has two parts: the document, which is what the configuration files contained, and the settings that the
document's validation returned. If the current configuration is invalid, the service and starting machines use the saved
document, because machines must start after a reboot of the host and keep their GPUs. If the current configuration files
still contain the saved document, the saved settings are used, so that nothing has to be validated again.

Every process that makes passes saves its configuration here. So other processes notice when a different configuration
comes into force (InForce).
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any

from msgspec import Struct, ValidationError, convert, to_builtins

from agent import __version__
from agent.config.document import Document
from agent.config.settings import Config
from agent.model.device import FileIdentity
from agent.model.errors import ConfigChangedError, DocumentError
from agent.model.json_document import parse_object
from agent.model.paths import LAST_GOOD_CONFIG, LAST_GOOD_LOCK, RUNTIME
from agent.system.files import System


def _installation() -> str:
    try:
        # Installing a package replaces the files in this directory, and so changes the directory's ctime.
        return f"{__version__} {os.stat(os.path.dirname(__file__)).st_ctime_ns}"
    except OSError:
        return ""


INSTALLATION = _installation()
"""Identifies the code that this process runs. Settings that other code validated are not used, because this code might
reject their document. Empty if unknown."""


def last_good_document(system: System) -> Document:
    """Return the last good document, or an empty one if none is saved. The caller must validate it again."""
    return Document(_saved(system).get("document", {}), {}, LAST_GOOD_CONFIG)


def known_settings(document: dict[str, Any], system: System) -> Config | None:
    """Return the saved settings if `document` is the last good one and this installation validated it; else None."""
    saved = _saved(system)
    known = bool(INSTALLATION) and saved.get("validated_by") == INSTALLATION and _same(saved, document)
    return _settings(saved) if known else None


def save_last_good(document: dict[str, Any], config: Config, system: System) -> None:
    """Save the configuration as the last good one. Raises no error.

    If saving fails, remove the configuration that was saved before, unless it is the same.
    """
    # The document is saved too, because a later release may have other defaults: it validates the document again, and
    # does not use the settings.
    saved = {"validated_by": INSTALLATION, "document": document, "settings": to_builtins(config)}
    content = json.dumps(saved, default=str).encode() + b"\n"
    try:
        with _only_writer(system):
            # Not public, because the configuration files may be readable by root only.
            system.write(LAST_GOOD_CONFIG, content, 0o600)
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
        if _compared(settings) != _compared(self.config):
            raise ConfigChangedError("the configuration has changed in the meantime", "run the command again")


def last_good_identity(system: System) -> FileIdentity | None:
    """Return the identity of the last good configuration's file; None if there is none, or it cannot be read."""
    try:
        return system.identity(LAST_GOOD_CONFIG)
    except OSError:
        return None


def _compared(config: Config) -> str:
    """Return a text by which settings are compared. Saving settings and reading them again does not change their text.

    The settings themselves cannot be compared, because TOML has dates, times and NaN. If a date or time is saved as
    JSON, it is read again as a string. NaN does not even equal itself.
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
    """Keep other processes from writing the file. Raises OSError at once if another process is writing it now.

    At the first boot after an upgrade, the service and every starting machine save the same document. All use the same
    temporary file, so only one of them may write. The others do not wait, because no machine's start may wait for
    another process.
    """
    system.make_directory(RUNTIME)
    descriptor = system.open_lock(LAST_GOOD_LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _saved(system: System) -> dict[str, Any]:
    """Return the file's content; empty if there is no file, or the file is damaged."""
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
        # The document has a date or time of TOML, which JSON lacks. So it is validated again each time.
        return False
