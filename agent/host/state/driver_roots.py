"""A driver root's manifest (`MANIFESTS/<index>.json`), and the record of the driver roots that a machine was handed."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent.model.errors import DocumentError
from agent.model.facts import Library, StagedRoot

VERSION = 2
HANDED_VERSION = 1


def render_manifest(root: StagedRoot) -> bytes:
    """Return the manifest as JSON."""
    document = {
        "version": VERSION,
        "index": root.index,
        "vendor": root.vendor,
        "driver_version": root.version,
        "place": root.place,
        "files": [asdict(file) for file in root.files],
    }
    return json.dumps(document, indent=1).encode() + b"\n"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _File(_Model):
    target: Annotated[str, Field(min_length=1)]
    source: str
    link: str
    size: int
    mtime_ns: int
    executable: bool
    text: str = ""


class _Manifest(_Model):
    version: Literal[1, 2]
    index: Annotated[int, Field(ge=0)]
    vendor: str
    driver_version: str
    place: str = ""
    files: list[_File]
    staged: dict[str, object] = {}
    """Version 1 only: what the agent watched of each file. Ignored."""


class _Handed(_Model):
    version: Literal[1]
    indices: list[Annotated[int, Field(ge=0)]]


def render_handed(indices: Iterable[int]) -> bytes:
    """Return the record of the driver roots that a machine was handed since its start."""
    return json.dumps({"version": HANDED_VERSION, "indices": sorted(set(indices))}).encode() + b"\n"


def parse_handed(path: str, data: bytes) -> tuple[int, ...]:
    """Return the indices in the record. Raises DocumentError, which names the key."""
    try:
        return tuple(_Handed.model_validate_json(data).indices)
    except ValidationError as error:
        advice = "until the machine's next start no driver root is removed"
        raise DocumentError(f"{path}: {_first(error)}", advice) from error


def parse_manifest(path: str, data: bytes) -> StagedRoot:
    """Return the driver root of a manifest. Raises DocumentError, which names the key."""
    try:
        manifest = _Manifest.model_validate_json(data)
    except ValidationError as error:
        raise DocumentError(f"{path}: {_first(error)}", "the driver root is left out and staged again") from error
    files = tuple(Library(**each.model_dump()) for each in manifest.files)
    return StagedRoot(manifest.index, manifest.vendor, manifest.driver_version, files, manifest.place)


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "the document"
    return f"{key}: {first['msg']}"
