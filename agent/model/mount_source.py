"""The source of a mount, as the host observes it. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MountSource:
    """The source of a mount in the settings, with symbolic links resolved."""

    path: str
    components: tuple[str, ...]
    """Each directory and symbolic link that the configured path leads through, and the source itself."""
