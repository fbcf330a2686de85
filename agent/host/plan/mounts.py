"""Plans the extra mounts of a machine. Pure."""

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from agent.config.mounts import ExtraMount
from agent.config.settings import MachineSettings
from agent.model.facts import Absent, Broken, Facts, Unseen
from agent.model.mount_source import MountSource


class Mounts(Struct, frozen=True):
    """The mounts of one machine from its next start on."""

    possible: tuple[ExtraMount, ...] = ()
    """Mounts whose `source` is the real path: nspawn would follow a link, which may change before the start."""
    missing: tuple[str, ...] = ()
    """Sources that are missing or must not be mounted, in words. They are left out of the settings, because a missing
    source would prevent the machine's start."""


def split_mounts(mounts: Sequence[ExtraMount], facts: Facts, machines: Mapping[str, MachineSettings]) -> Mounts:
    """Split the mounts into those that are possible now and the others. `machines` has the settings of all machines."""
    mounted_by = _mounted_paths(facts, machines) if mounts else {}
    possible, missing = [], []
    for mount in mounts:
        match facts.mount_sources.get(mount.source):
            case MountSource() as source if outer := _outer_path(source, mounted_by):
                # A read-only mount of `outer` counts too, because root in the machine can remount it writable.
                why = f"the path to it leads through {outer}, where machine {mounted_by[outer]} could put a link"
                missing.append(f"{mount.source} for {mount.target} ({why})")
            case MountSource(path=real):
                possible.append(replace(mount, source=real))
            case Broken(why) | Unseen(why):
                missing.append(f"{mount.source} for {mount.target} ({why})")
            case Absent() | None:
                missing.append(f"{mount.source} for {mount.target}")
    return Mounts(tuple(possible), tuple(missing))


def _mounted_paths(facts: Facts, machines: Mapping[str, MachineSettings]) -> dict[str, str]:
    """Return the host paths that machines mount or will mount, each with a machine that could put links there."""
    mounted_by = {path: name for name, settings in machines.items() for path in _configured_sources(settings, facts)}
    real_paths = {source.path: mounted_by[path] for path, source in facts.mount_sources.items()
                  if path in mounted_by and isinstance(source, MountSource)
                  and not _outer_path(source, mounted_by)}  # fmt: skip
    return mounted_by | real_paths


def _configured_sources(settings: MachineSettings, facts: Facts) -> Iterator[str]:
    """Yield the host paths that the settings `extra_mounts` and `nspawn.extra` mount."""
    yield from (mount.source for mount in settings.extra_mounts)
    for path in settings.nspawn.mounted_paths():
        # The path may contain `//`, `.` and `..`. nspawn does not check the path, and follows every link in it.
        yield f"/{posixpath.normpath(path).lstrip('/')}"
        if path in facts.nspawn_sources:
            yield facts.nspawn_sources[path]


def _outer_path(source: MountSource, paths: Iterable[str]) -> str:
    """Return the first of `paths` that the path to the source leads through; empty if there is none."""
    return next((path for path in paths for step in source.components if step.startswith(f"{path.rstrip('/')}/")), "")
