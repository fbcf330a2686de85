"""What was staged into a driver root (`MANIFESTS/<index>.json`), from where, and which ones a machine was handed."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent.errors import DocumentError
from agent.facts import Library, StagedRoot
from agent.identity import FileIdentity

VERSION = 1


@dataclass(frozen=True, slots=True)
class StagedIdentity:
    """What must not change in a published copy: writing, replacing and chmod all change one of these."""

    inode: int
    size: int
    ctime_ns: int


def staged_identity(identity: FileIdentity) -> StagedIdentity:
    return StagedIdentity(identity.inode, identity.size, identity.ctime_ns)


def render_manifest(root: StagedRoot, identities: Mapping[str, FileIdentity]) -> bytes:
    """The document; `identities` of the copies by target, links have none."""
    document = {
        "version": VERSION,
        "index": root.index,
        "vendor": root.vendor,
        "driver_version": root.version,
        # `text` only where there is one: a release before it refuses the key, and would stage all anew.
        "files": [{key: each for key, each in asdict(file).items() if each or key != "text"} for file in root.files],
        "staged": {target: asdict(staged_identity(each)) for target, each in sorted(identities.items())},
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


class _Identity(_Model):
    inode: int
    size: int
    ctime_ns: int


class _Manifest(_Model):
    version: Literal[1]
    index: Annotated[int, Field(ge=0)]
    vendor: str
    driver_version: str
    files: list[_File]
    staged: dict[str, _Identity]


class _Origin(_Model):
    version: Literal[1]
    place: Annotated[str, Field(min_length=1)]
    manifest: str


class _Handed(_Model):
    version: Literal[1]
    indices: list[Annotated[int, Field(ge=0)]]


def render_handed(indices: Iterable[int]) -> bytes:
    """The record of the driver roots that a machine was handed since it was started."""
    return json.dumps({"version": VERSION, "indices": sorted(set(indices))}).encode() + b"\n"


def parse_handed(path: str, data: bytes) -> tuple[int, ...]:
    """Raises DocumentError, which names the key."""
    try:
        return tuple(_Handed.model_validate_json(data).indices)
    except ValidationError as error:
        advice = "until the machine's next start no driver root is removed"
        raise DocumentError(f"{path}: {_first(error)}", advice) from error


def parse_manifest(path: str, data: bytes) -> tuple[StagedRoot, dict[str, StagedIdentity]]:
    """The root, and the identities of its copies by target. Raises DocumentError, which names the key."""
    try:
        manifest = _Manifest.model_validate_json(data)
    except ValidationError as error:
        raise DocumentError(f"{path}: {_first(error)}", "the driver root is left out and staged anew") from error
    files = tuple(Library(**each.model_dump()) for each in manifest.files)
    identities = {target: StagedIdentity(**each.model_dump()) for target, each in manifest.staged.items()}
    missing = {file.target for file in files if not file.link} ^ set(identities)
    if missing:
        raise DocumentError(f"{path}: staged: {min(missing)} is not in both files and staged", "it is staged anew")
    return StagedRoot(manifest.index, manifest.vendor, manifest.driver_version, files), identities


def render_origin(place: str, manifest: bytes) -> bytes:
    """Where the host had what a driver root holds: beside the manifest, in which releases before refuse new keys.

    With the manifest's SHA-256: such a release removes a root without this record, and gives its index to another one.
    """
    document = {"version": VERSION, "place": place, "manifest": hashlib.sha256(manifest).hexdigest()}
    return json.dumps(document).encode() + b"\n"


def parse_origin(path: str, data: bytes, manifest: bytes) -> str:
    """The place's name, empty where it is of another manifest. Raises DocumentError, which names the key."""
    try:
        origin = _Origin.model_validate_json(data)
    except ValidationError as error:
        raise DocumentError(f"{path}: {_first(error)}", "where that driver root came from is not known") from error
    return origin.place if origin.manifest == hashlib.sha256(manifest).hexdigest() else ""


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "the document"
    return f"{key}: {first['msg']}"
