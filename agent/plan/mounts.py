"""What of the host is mounted into a machine beside devices. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.config import MachineSettings
from agent.extras import ExtraMount
from agent.facts import Absent, Broken, Facts, Unseen


@dataclass(frozen=True, slots=True)
class Mounts:
    """What one machine gets from its next start on."""

    found: tuple[ExtraMount, ...] = ()
    """By the real paths of their sources: nspawn follows links as root, who knows where they lead by then."""
    lacking: tuple[str, ...] = ()
    """What would stop the machine's start, or may not be mounted, in words."""


def there(mounts: Sequence[ExtraMount], facts: Facts, machines: Mapping[str, MachineSettings]) -> Mounts:
    """`machines`: all that are configured."""
    given = {
        real: name
        for name, settings in machines.items()
        for mount in settings.extra_mounts
        if isinstance(real := facts.mount_sources.get(mount.source), str)
    }
    found, lacking = [], []
    for mount in mounts:
        match facts.mount_sources.get(mount.source):
            case str() as real if around := next((each for each in given if real.startswith(f"{each}/")), ""):
                # Read-only as well: root in a machine can remount what it has.
                why = f"it lies in {around}, where machine {given[around]} could put a link to anything of the host"
                lacking.append(f"{mount.source} for {mount.target} ({why})")
            case str() as real:
                found.append(mount.model_copy(update={"source": real}))
            case Broken(why) | Unseen(why):
                lacking.append(f"{mount.source} for {mount.target} ({why})")
            case Absent() | None:
                lacking.append(f"{mount.source} for {mount.target}")
    return Mounts(tuple(found), tuple(lacking))
