"""What of the host is mounted into a machine beside devices. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent.config import MachineSettings
from agent.extras import ExtraMount
from agent.facts import Absent, Broken, Facts, MountSource, Unseen

BINDS = ("Bind", "BindReadOnly")
BIND_SOURCE = re.compile(r"-?(?P<path>/(?:\\.|[^:\\])*)")
"""Of such a line: the path up to a colon, where `\\:` is none (systemd.nspawn(5), --bind= of systemd-nspawn(1))."""


@dataclass(frozen=True, slots=True)
class Mounts:
    """What one machine gets from its next start on."""

    found: tuple[ExtraMount, ...] = ()
    """By the real paths of their sources: nspawn follows links as root, who knows where they lead by then."""
    lacking: tuple[str, ...] = ()
    """What would stop the machine's start, or may not be mounted, in words."""


def there(mounts: Sequence[ExtraMount], facts: Facts, machines: Mapping[str, MachineSettings]) -> Mounts:
    """`machines`: all that are configured."""
    given = _given(facts, machines) if mounts else {}
    found, lacking = [], []
    for mount in mounts:
        match facts.mount_sources.get(mount.source):
            case MountSource() as source if around := _around(source, given):
                # Read-only as well: root in a machine can remount what it has.
                why = f"the way to it leads through {around}, where machine {given[around]} could put a link"
                lacking.append(f"{mount.source} for {mount.target} ({why})")
            case MountSource(path=real):
                found.append(mount.model_copy(update={"source": real}))
            case Broken(why) | Unseen(why):
                lacking.append(f"{mount.source} for {mount.target} ({why})")
            case Absent() | None:
                lacking.append(f"{mount.source} for {mount.target}")
    return Mounts(tuple(found), tuple(lacking))


def _given(facts: Facts, machines: Mapping[str, MachineSettings]) -> dict[str, str]:
    """Machines by what they have mounted, now or as soon as it is there: in it they can lead anything anywhere."""
    given = {path: name for name, settings in machines.items() for path in _named(settings)}
    seen = {source.path: given[path] for path, source in facts.mount_sources.items()
            if path in given and isinstance(source, MountSource) and not _around(source, given)}  # fmt: skip
    return given | seen


def _named(settings: MachineSettings) -> Iterator[str]:
    yield from (mount.source for mount in settings.extra_mounts)
    for key in BINDS:
        lines = settings.nspawn.extra.get("Files", {}).get(key, [])
        for line in [lines] if isinstance(lines, str) else lines:
            if source := BIND_SOURCE.match(line):
                yield re.sub(r"\\(.)", r"\1", source["path"])


def _around(source: MountSource, places: Iterable[str]) -> str:
    """The first of the places below which a step of the way to a source is."""
    return next((place for place in places for step in source.way if step.startswith(f"{place.rstrip('/')}/")), "")
