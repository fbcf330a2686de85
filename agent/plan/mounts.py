"""What of the host is mounted into a machine beside devices. Pure."""

from collections.abc import Sequence

from agent.extras import ExtraMount, mountable
from agent.facts import Absent, Broken, Facts, Unseen


def there(mounts: Sequence[ExtraMount], facts: Facts) -> tuple[tuple[ExtraMount, ...], tuple[str, ...]]:
    """Those whose source is there, since any other would stop the machine's start; and the others, in words."""
    found, lacking = [], []
    for mount in mounts:
        match facts.mount_sources.get(mount.source):
            case str() as real:
                try:
                    # A link may lead where no source may be.
                    mountable(real)
                    found.append(mount)
                except ValueError as error:
                    lacking.append(f"{mount.source} for {mount.target} ({error})")
            case Broken(why) | Unseen(why):
                lacking.append(f"{mount.source} for {mount.target} ({why})")
            case Absent() | None:
                lacking.append(f"{mount.source} for {mount.target}")
    return tuple(found), tuple(lacking)
