"""Digests by which the agent recognises content."""

import json

# Imported as in the standard library's random.py, because hashlib loads OpenSSL, which takes a twentieth of the machine
# half's run time.
try:
    from _sha2 import sha256 as _sha256  # type: ignore[import-not-found]
except ImportError:
    try:
        # Python 3.11.
        from _sha256 import sha256 as _sha256  # type: ignore[import-not-found]
    except ImportError:
        # A Python that was built without its own SHA-256.
        from hashlib import sha256 as _sha256


def sha256(content: bytes) -> str:
    """Return the SHA-256 digest in hexadecimal."""
    digest: str = _sha256(content).hexdigest()
    return digest


def json_digest(value: object) -> str:
    """Return the digest of a value in JSON, whatever the order of its keys."""
    return sha256(json.dumps(value, sort_keys=True).encode())
