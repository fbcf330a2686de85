"""The source of a mount, as the host observes it. Pure."""

from msgspec import Struct


class MountSource(Struct, frozen=True):
    """The source of a mount in the settings, with symbolic links resolved."""

    path: str
    components: tuple[str, ...]
    """Each directory and symbolic link that the configured path leads through, and the source itself."""
