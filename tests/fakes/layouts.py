"""OCI layouts as skopeo makes them."""

import gzip
import hashlib
import json
from pathlib import Path

from tests.fakes.archives import entry, packed

GZIP = b"\x1f\x8b"


def put_layout(directory: Path, *layers: bytes, media_type: str = "") -> None:
    """Make a layout with one image, of these layers, or of one small layer.

    The media type of its layers is the right one unless it is given.
    """
    blobs = directory / "blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    def put_layer(content: bytes) -> dict[str, object]:
        kind = f"application/vnd.oci.image.layer.v1.tar{'+gzip' if content[:2] == GZIP else ''}"
        return {**put(content), "mediaType": media_type or kind}

    found = [put_layer(each) for each in layers or (gzip.compress(packed(entry("sbin/init"))),)]
    manifest = put(json.dumps({"schemaVersion": 2, "layers": found}).encode())
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
