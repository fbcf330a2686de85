"""Digests by which the agent recognises content."""

import hashlib
import json


def sha256(content: bytes) -> str:
    """Return the SHA-256 digest in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def json_digest(value: object) -> str:
    """Return the digest of a value in JSON, whatever the order of its keys."""
    return sha256(json.dumps(value, sort_keys=True).encode())
