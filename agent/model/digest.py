"""Digests by which the agent recognizes content."""

try:
    # As in the standard library's random.py: hashlib loads OpenSSL, a twentieth of the machine half's run time.
    from _sha2 import sha256 as _sha256  # type: ignore[import-not-found]
except ImportError:
    # Python 3.11.
    from hashlib import sha256 as _sha256


def sha256(content: bytes) -> str:
    """Return the SHA-256 digest in hexadecimal."""
    digest: str = _sha256(content).hexdigest()
    return digest
