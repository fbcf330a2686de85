"""What of the host machines' settings mount into them: whether it is there."""

from agent.config import Config
from agent.facts import Seen
from agent.system.deadlines import ask_device
from agent.system.files import System
from agent.system.looking import look


def observe_sources(config: Config, system: System) -> dict[str, Seen[str]]:
    """By source its path without symbolic links. In bounded time: a network's file system may not answer."""
    sources = sorted({mount.source for settings in config.machines.values() for mount in settings.extra_mounts})
    return {source: look(lambda path: ask_device(path, lambda: system.real_path(path)), source) for source in sources}
