"""Validates a changed configuration in a child process, whose end frees the memory of pydantic.

In the service, pydantic would stay until the next restart, and take a third of the memory.
"""

import os
import sys
from contextlib import suppress

from agent.config.document import read_document
from agent.config.last_good import known_settings
from agent.config.load import load_config
from agent.model.errors import AgentError
from agent.model.paths import CONFIG_FILE
from agent.system.files import System
from agent.system.host_runner import host_runner

CODE = "import sys; sys.path[:] = sys.argv[2:]; from agent.config.child import main; main(sys.argv[1])"
"""What the child runs. Its arguments are the root directory of `System`, and the modules' path in the parent."""
LIMIT = 30.0
"""Seconds. The service's watchdog waits four times as long."""


def validated(system: System) -> bool:
    """Return whether the configuration's settings are known, which saves validating its files again."""
    try:
        return known_settings(read_document(system, CONFIG_FILE).content, system) is not None
    except AgentError:
        return False


def validate_in_child(system: System) -> None:
    """Unless the settings are known already, let a child validate the configuration and save it as the last good one.

    Raises no error: the caller loads the configuration afterwards, and validates what the child has not saved.
    """
    if validated(system):
        return
    with suppress(AgentError):
        # -S: the module `site` need not search for directories, because the child gets this process's path. -B: a new
        # directory __pycache__ would change INSTALLATION, so this process would not use what the child saves.
        system.run(sys.executable, "-BIS", "-c", CODE, system.full_path("/"), *sys.path, timeout=LIMIT)


def main(root: str) -> None:
    """Validate and save the configuration. This is all that the child does. Raises ConfigError."""
    # See agent.cli.entry.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    load_config(System(host_runner, root), save=True)
