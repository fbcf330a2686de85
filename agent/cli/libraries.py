"""Loads libraries without modules that they would load for functions that the agent does not use."""

import sys
from importlib import import_module
from types import ModuleType


def load_msgspec() -> None:
    """Load msgspec without typing_extensions, which would load `inspect` and take a third of the loading time.

    msgspec 0.22 tries typing_extensions first, for functions that Python's own `typing` has had since 3.11.
    """
    if "msgspec" in sys.modules:
        return
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
    import msgspec  # noqa: F401

    del sys.modules["typing_extensions"]


def load_prometheus_client() -> None:
    """Load prometheus_client and http.server without OpenSSL, which would take 5 of the service's 33 MB.

    prometheus_client 0.26 imports ssl for its own server, and urllib.request, which imports hashlib, to push metrics.
    Without the module _hashlib, hashlib uses Python's own digests, as it does if Python was built without OpenSSL.
    """
    if "prometheus_client" in sys.modules:
        return
    ssl = None if "ssl" in sys.modules else _Ssl("ssl")
    without_hashlib = ssl is not None and _has_own_digests()
    if ssl:
        sys.modules["ssl"] = ssl
    if without_hashlib:
        sys.modules["_hashlib"] = None  # type: ignore[assignment]
    import prometheus_client  # noqa: F401

    if without_hashlib:
        del sys.modules["_hashlib"]
    if ssl:
        del sys.modules["ssl"]
        ssl.in_annotations = False


def _has_own_digests() -> bool:
    """Return whether this Python has its own code for digests, and so needs no OpenSSL for hashlib.

    Python of Fedora and RHEL has such code only for BLAKE2. There, hashlib without OpenSSL would lack SHA-512, which
    the standard library's random.py needs.
    """
    sha2 = ("_sha2",) if sys.version_info >= (3, 12) else ("_sha256", "_sha512")
    try:
        for name in ("_blake2", "_md5", "_sha1", "_sha3", *sha2):
            import_module(name)
    except ImportError:
        return False
    return True


class _Ssl(ModuleType):
    """The module ssl for modules that only mention it while they are loaded. Any later use loads the real one."""

    in_annotations = True
    """Whether modules are still being loaded. Until then, ssl's classes occur only in annotations and as defaults."""

    def __getattr__(self, name: str) -> object:
        if self.in_annotations:
            return object
        return getattr(import_module("ssl"), name)
