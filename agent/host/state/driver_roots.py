"""Formats of a driver root's manifest (`MANIFESTS/<index>.json`), and of a machine's record of driver roots. Pure.

The record lists the roots that handoffs have named since the machine's start.
"""

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import asdict

from agent.host.state.record import Record
from agent.model.driver_root import Library, StagedRoot


class _File(Struct, frozen=True):
    target: Annotated[str, Meta(min_length=1)]
    source: str
    link: str
    size: int
    mtime_ns: int
    executable: bool
    text: str


class _Manifest(Struct, frozen=True, kw_only=True):
    index: Annotated[int, Meta(ge=0)]
    vendor: str
    driver_version: str
    place: str
    files: tuple[_File, ...]


class _Handed(Struct, frozen=True):
    indices: list[Annotated[int, Meta(ge=0)]]


_MANIFEST = Record(_Manifest, 1, advice="the driver root is ignored, and staged again")
_HANDED = Record(_Handed, 1, advice="no driver root is removed until the machine's next start")


def render_manifest(root: StagedRoot) -> bytes:
    """Return the manifest of a driver root."""
    files = tuple(_File(**asdict(file)) for file in root.files)
    return _MANIFEST.render(
        _Manifest(index=root.index, vendor=root.vendor, driver_version=root.version, place=root.place, files=files)
    )


def parse_manifest(path: str, data: bytes) -> StagedRoot:
    """Return the driver root in a manifest. Raises DocumentError, which names the key."""
    manifest = _MANIFEST.parse(path, data)
    files = tuple(Library(**asdict(each)) for each in manifest.files)
    return StagedRoot(manifest.index, manifest.vendor, manifest.driver_version, files, manifest.place)


def render_handed(indices: Iterable[int]) -> bytes:
    """Return the record of the driver roots that handoffs have named since the machine's start."""
    return _HANDED.render(_Handed(sorted(set(indices))))


def parse_handed(path: str, data: bytes) -> tuple[int, ...]:
    """Return the indices in a record that `render_handed` made. Raises DocumentError, which names the key."""
    return tuple(_HANDED.parse(path, data).indices)
