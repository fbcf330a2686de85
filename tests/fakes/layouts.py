"""OCI layouts as skopeo makes them."""

import gzip
import hashlib
import json
from pathlib import Path

from tests.fakes.archives import entry, packed


def put_layout(directory: Path, *layers: bytes) -> None:
    """Make a layout with one image, of these layers, or of one small layer."""
    blobs = directory / "blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    found = [put(each) for each in layers or (gzip.compress(packed(entry("sbin/init"))),)]
    manifest = put(json.dumps({"schemaVersion": 2, "layers": found}).encode())
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
