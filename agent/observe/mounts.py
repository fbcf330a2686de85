"""What of the host machines' settings mount into them: whether it is there, and whose the way to it is."""

from collections.abc import Collection

from agent.config import Config
from agent.extras import SECRET, is_below, mountable, plain
from agent.facts import Broken, MountSource, Seen
from agent.system.deadlines import ask_source
from agent.system.files import System
from agent.system.looking import look
from agent.system.owners import others_way, steps


def observe_sources(config: Config, system: System) -> dict[str, Seen[MountSource]]:
    """By source; Broken where it may not be mounted. In bounded time: a network's file system may not answer."""
    sources = sorted({mount.source for settings in config.machines.values() for mount in settings.extra_mounts})
    secret = {*SECRET, *_real_paths(system)} if sources else set[str]()
    return {source: look(lambda path: _source(system, path, secret), source) for source in sources}


def _real_paths(system: System) -> list[str]:
    """Of what no machine gets: /var/lib/machines may be a link."""
    seen = (look(system.real_path, path) for path in SECRET)
    return [path for path in seen if isinstance(path, str)]


def _source(system: System, path: str, secret: Collection[str]) -> MountSource | Broken:
    """Raises OSError."""
    source = ask_source(path, lambda: _answering(system, path))
    try:
        mountable(plain(source.path), secret)
    except ValueError as error:
        return Broken(str(error))
    if any(is_below(step, secret) for step in source.way):
        return Broken("the way to it leads through what rules over the host or other machines")
    # Whoever can put a link in its place chooses what of the host root in the machine sees.
    if why := ask_source(f"the way to {path}", lambda: others_way(system, path, to_it=True)):
        return Broken(f"{why}, who could lead it anywhere")
    return source


def _answering(system: System, path: str) -> MountSource:
    real = system.real_path(path)
    # What only looks at names, as lstat(2) does, leaves an automount point as it is; statfs(2) mounts it.
    system.free_bytes(real)
    return MountSource(real, steps(system, path))
