"""Saves the last valid configuration, for a service or a machine that starts while the current one is invalid.

A machine must start after a reboot of the host, and keep its GPUs, even if a configuration file has become invalid.
"""

import contextlib

from msgspec import Struct
from pydantic import ValidationError

from agent.config.load import load_config
from agent.config.settings import Config
from agent.model.errors import ConfigError, NoMachinesError
from agent.model.paths import LAST_GOOD_CONFIG
from agent.system.files import System


class Loaded(Struct, frozen=True):
    """The configuration to use."""

    config: Config
    rejected: str = ""
    """Why the files were rejected, if the last valid configuration is used instead; otherwise empty."""


def load_or_last_good(system: System) -> Loaded:
    """Return the configuration and save it as the last good one; if it is invalid, return the last good one.

    Raises ConfigError if there is no usable last good one either. Raises NoMachinesError if there is no file, or no
    file has a table of machines: the last good one is not used then, because removed machines must not come back.
    """
    try:
        config = load_config(system)
    except NoMachinesError:
        raise
    except ConfigError as error:
        try:
            return Loaded(Config.model_validate_json(system.read(LAST_GOOD_CONFIG)), str(error))
        except (OSError, ValidationError):
            raise error from None
    save_last_good(config, system)
    return Loaded(config)


def save_last_good(config: Config, system: System) -> None:
    """Save the configuration as the last good one. If that fails, remove the previous one; raise no error."""
    # Save only explicit settings, because a later release may read the file and have other defaults.
    content = config.model_dump_json(exclude_unset=True, indent=1).encode() + b"\n"
    try:
        if not system.exists(LAST_GOOD_CONFIG) or system.read(LAST_GOOD_CONFIG) != content:
            # The configuration files may be readable by root only.
            system.write(LAST_GOOD_CONFIG, content, 0o600)
    except OSError:
        # Better no copy than an outdated one, which may grant what this configuration no longer grants. A file can be
        # removed even from a full disk.
        with contextlib.suppress(OSError):
            system.remove(LAST_GOOD_CONFIG)
