"""Content-addressed build cache, so that a second run of the bed starts in seconds."""

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from integration.bed.architecture import CHOSEN

UNUSED = 2 * 3600.0
"""A build removes results that nobody has used for so many seconds. A result that was used more recently may still be
in use by a run of another checkout."""
REPOSITORY = Path(__file__).resolve().parents[2]


def cache_root() -> Path:
    """Return `$XDG_CACHE_HOME/unbounded-agent`, by default below `~/.cache` (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(base) / "unbounded-agent"
    root.mkdir(parents=True, exist_ok=True)
    return root


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print to standard error what is being done, and how many seconds it took."""
    print(f"==> {title} ...", file=sys.stderr, flush=True)
    started = time.monotonic()
    yield
    print(f"    {title}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def digest(inputs: Iterable[Path | str]) -> str:
    """Return a hex digest of strings, files and directory trees (names, modes and contents)."""
    total = hashlib.sha256()
    for item in inputs:
        if isinstance(item, str):
            total.update(b"text\0" + item.encode() + b"\0")
            continue
        files = [item] if item.is_file() else sorted(path for path in item.rglob("*") if path.is_file())
        for file in files:
            if "__pycache__" in file.parts:
                continue
            name = file.name if file is item else str(file.relative_to(item))
            total.update(f"file\0{name}\0{file.stat().st_mode:o}\0".encode())
            total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of this name. Other processes that want it wait."""
    with (cache_root() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


BUILD = {"VERSION": "0.1.0+bed"}
"""Environment of the programs that build the agent. By default its version would change with each commit, and nothing
that was built before could be used again."""


def cached(name: str, inputs: Iterable[Path | str], build: Callable[[Path], None]) -> Path:
    """Return the directory that `build` fills from `inputs`. It is built once, and published by one rename.

    A build also removes results of the same name that have not been used for UNUSED seconds: they take gigabytes.
    """
    if CHOSEN.is_foreign:
        name = f"{name}-{CHOSEN.debian}"
    root = cache_root()
    result = root / f"{name}-{digest(inputs)}"
    with locked(name):
        if result.is_dir():
            os.utime(result)
            return result
        with step(f"build {name}"):
            partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
            try:
                partial.chmod(0o755)
                build(partial)
                partial.rename(result)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        for stale in root.glob(f"{name}-" + "[0-9a-f]" * 16):
            if stale != result and time.time() - stale.stat().st_mtime > UNUSED:
                shutil.rmtree(stale, ignore_errors=True)
    return result
