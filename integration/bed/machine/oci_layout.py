"""Writes images into an OCI layout without an image tool, so that they can be as hostile as any from a registry."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MEDIA = "application/vnd.oci.image."


@dataclass(frozen=True)
class Entry:
    """A member of a layer: a file, or with `kind` something else."""

    name: str
    content: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    device: tuple[int, int] = (0, 0)


INIT = Entry("sbin/init", b"#!/bin/sh\n", mode=0o755)
"""What a machine needs to boot."""


def link(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.SYMTYPE, link=target)


def directory(name: str) -> Entry:
    return Entry(name, kind=tarfile.DIRTYPE, mode=0o755)


@dataclass
class Layout:
    """An OCI layout on disk, whose images have tags."""

    place: Path
    _tags: dict[str, dict[str, Any]] = field(default_factory=dict)

    def name(self, tag: str) -> str:
        """Return the image's name with its transport."""
        return f"oci:{self.place}:{tag}"

    def add(self, tag: str, *layers: Sequence[Entry], architecture: str = "amd64") -> str:
        """Add an image for one architecture, and return its digest."""
        return self._tagged(tag, self._image(layers, architecture))

    def add_index(self, tag: str, images: dict[str, Sequence[Entry]]) -> dict[str, str]:
        """Add an index with an image of one layer for each architecture; return the images' digests by architecture."""
        manifests = {
            architecture: {
                **self._image((entries,), architecture),
                "platform": {"os": "linux", "architecture": architecture},
            }
            for architecture, entries in images.items()
        }
        document = {"schemaVersion": 2, "mediaType": f"{MEDIA}index.v1+json", "manifests": [*manifests.values()]}
        self._tagged(tag, self._blob(document, "index.v1+json"))
        return {architecture: str(each["digest"]) for architecture, each in manifests.items()}

    def _image(self, layers: Sequence[Sequence[Entry]], architecture: str) -> dict[str, Any]:
        archives = [_archive(each) for each in layers]
        digests = [f"sha256:{hashlib.sha256(each).hexdigest()}" for each in archives]
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": digests},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{MEDIA}manifest.v1+json",
            "config": self._blob(config, "config.v1+json"),
            "layers": [self._blob(gzip.compress(each, 1, mtime=0), "layer.v1.tar+gzip") for each in archives],
        }
        return self._blob(manifest, "manifest.v1+json")

    def _blob(self, content: bytes | dict[str, Any], kind: str) -> dict[str, Any]:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        digest = hashlib.sha256(data).hexdigest()
        blobs = self.place / "blobs/sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        (blobs / digest).write_bytes(data)
        return {"mediaType": MEDIA + kind, "digest": f"sha256:{digest}", "size": len(data)}

    def _tagged(self, tag: str, descriptor: dict[str, Any]) -> str:
        self._tags[tag] = {**descriptor, "annotations": {"org.opencontainers.image.ref.name": tag}}
        (self.place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (self.place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [*self._tags.values()]}))
        return str(descriptor["digest"])


def _archive(entries: Sequence[Entry]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for entry in entries:
            member = tarfile.TarInfo(entry.name)
            member.size, member.mode, member.type, member.linkname = (
                len(entry.content),
                entry.mode,
                entry.kind,
                entry.link,
            )
            member.devmajor, member.devminor = entry.device
            archive.addfile(member, io.BytesIO(entry.content))
    return file.getvalue()
