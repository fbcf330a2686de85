"""Directories for files that a run of the bed keeps while it lasts."""

import os
import shutil
import tempfile
from pathlib import Path


def run_directory(name: str) -> Path:
    """Return a new directory of this process, mode 0700. Removes those of this name that killed processes have left."""
    for directory in Path(tempfile.gettempdir()).glob(f"{name}-[0-9]*-*"):
        pid = directory.name.removeprefix(f"{name}-").partition("-")[0]
        if not Path("/proc", pid).exists():
            shutil.rmtree(directory, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-{os.getpid()}-"))
