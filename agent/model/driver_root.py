"""A driver root, and the files in it."""

from msgspec import Struct


class Library(Struct, frozen=True, order=True):
    """One driver library or companion file, with its path on the host and its path below a driver root."""

    target: str
    """Relative path below the driver root, such as `usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01`."""
    source: str
    """Absolute real path on the host (no symbolic link in it); empty for a link."""
    link: str = ""
    """For a symbolic link: what it points to, relative to its own directory."""
    size: int = 0
    mtime_ns: int = 0
    executable: bool = False
    text: str = ""
    """If the source's text names paths that exist only on the host: the text that the copy gets instead. Otherwise
    empty."""


UNSTAGED = -1
"""Index of a driver root that is not on disk yet, until the plan gives it an index of its own."""


class StagedRoot(Struct, frozen=True, eq=False):
    """One driver root. In facts, it is complete and on disk; in a goal, it may still have to be staged.

    Comparisons of roots ignore `place` and `hidden`.
    """

    index: int
    vendor: str
    version: str
    files: tuple[Library, ...]
    place: str = ""
    """Name of the place on the host from which the files were copied; empty if that was not recorded."""
    hidden: bool = False
    """The root is not mounted, so machines do not see it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StagedRoot) and self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)

    def __lt__(self, other: "StagedRoot") -> bool:
        return self._compared < other._compared

    @property
    def _compared(self) -> tuple[int, str, str, tuple[Library, ...]]:
        return self.index, self.vendor, self.version, self.files
