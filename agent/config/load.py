"""Loads the configuration, or the last good one while the current one is invalid."""

from msgspec import Struct

from agent.config.document import Document, read_document
from agent.config.last_good import known_settings, last_good_document, last_good_identity, save_last_good
from agent.config.settings import Config
from agent.model.device import FileIdentity
from agent.model.errors import ConfigError, NoMachinesError
from agent.model.paths import CONFIG_FILE
from agent.system.files import System


class Loaded(Struct, frozen=True):
    """The configuration to use."""

    config: Config
    rejected: str = ""
    """Why the files were rejected, if the last good configuration is used instead; otherwise empty."""
    in_force: bool = True
    """Whether `config` is the host's own configuration. If so, each pass checks that `config` is still in force
    (InForce). False, for example, if the user named another file (--config)."""
    before: FileIdentity | None = None
    """The identity that the last good configuration's file had before `config` was read (agent.config.last_good)."""


def load_config(system: System, path: str = CONFIG_FILE, *, save: bool = False) -> Config:
    """Return the validated configuration. If `path` is not CONFIG_FILE, read only that file.

    With `save`, the configuration becomes the last good one, but only if `path` is CONFIG_FILE.
    Raises ConfigError, which names the file and the key.
    """
    document, standard = read_document(system, path), path == CONFIG_FILE
    if standard and (known := known_settings(document.content, system)):
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
            last_good = _validate(last_good_document(system))
        except ConfigError:
            raise error from None
        return Loaded(last_good, str(error), before=before)


def _validate(document: Document) -> Config:
    # Imported only here, because loading pydantic takes 80 ms and 13 MB.
    from agent.config.validate import validate

    return validate(document)
