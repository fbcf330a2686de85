"""Observes the sources of extra mounts: whether they exist, and who controls the paths to them."""

from collections.abc import Collection

from agent.config.mounts import CONTROL_PATHS, mountable
from agent.config.settings import Config
from agent.config.values import is_below, plain
from agent.model.facts import Broken, Seen
from agent.model.mount_source import MountSource
from agent.system.deadlines import call_source
from agent.system.files import System
from agent.system.path_trust import path_components, untrusted_component
from agent.system.seen import read_seen


def observe_sources(config: Config, system: System) -> dict[str, Seen[MountSource]]:
    """Return each source, by its path in the settings; Broken if it must not be mounted.

    Each observation has a time limit, because a network mount may hang.
    """
    mounts = [mount for settings in config.machines.values() for mount in settings.extra_mounts]
    control_paths = {*CONTROL_PATHS, *_real_paths(system)} if mounts else set[str]()
    writable = {mount.source for mount in mounts if not mount.read_only}
    return {
        source: read_seen(lambda path: _source(system, path, control_paths, read_only=path not in writable), source)
        for source in sorted({mount.source for mount in mounts})
    }


def observe_nspawn_sources(config: Config, system: System) -> dict[str, str]:
    """Return the real paths of what `nspawn.extra` mounts, by the path in that setting.

    A path that cannot be resolved is left out. The result is empty if no machine has `extra_mounts`, because these
    paths are only compared with the paths to the sources of `extra_mounts`.
    """
    if not any(settings.extra_mounts for settings in config.machines.values()):
        return {}
    paths = {path for settings in config.machines.values() for path in settings.nspawn.mounted_paths()}
    seen = {path: read_seen(lambda path: call_source(path, lambda: system.real_path(path)), path) for path in paths}
    return {path: real for path, real in seen.items() if isinstance(real, str)}


def _real_paths(system: System) -> list[str]:
    """Return the real paths of CONTROL_PATHS: /var/lib/machines, for example, may be a link."""
    seen = (read_seen(system.real_path, path) for path in CONTROL_PATHS)
    return [path for path in seen if isinstance(path, str)]


def _source(system: System, path: str, control_paths: Collection[str], *, read_only: bool) -> MountSource | Broken:
    """Return the source; Broken if it must not be mounted. Raises OSError."""
    source = call_source(path, lambda: _resolve(system, path))
    try:
        mountable(plain(source.path), read_only=read_only, control_paths=control_paths)
    except ValueError as error:
        return Broken(str(error))
    if step := next((each for each in source.components if is_below(each, control_paths)), ""):
        return Broken(f"the path to it leads through {step}, which controls the host or other machines")
    # A user who can replace the source with a link could give root in the machine access to any part of the host.
    if why := call_source(f"the path to {path}", lambda: untrusted_component(system, path, any_last_owner=True)):
        return Broken(f"{why}: the path could be redirected")
    return source


def _resolve(system: System, path: str) -> MountSource:
    """Return the source with its real path. If the source is mounted on demand, mount it first. Raises OSError."""
    real = system.real_path(path)
    # statfs(2) triggers an automount, which lstat(2) and the like do not.
    system.free_bytes(real)
    return MountSource(real, path_components(system, path))
