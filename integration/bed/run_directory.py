"""Directories for the files that a run of the bed keeps until it ends."""

import os
import shutil
import tempfile
from pathlib import Path


def run_directory(name: str) -> Path:
    """Make a directory of mode 0700 for this process, and return it.

    Directories of the same name that killed processes have left are removed.
    """
    for directory in Path(tempfile.gettempdir()).glob(f"{name}-[0-9]*-*"):
        pid = directory.name.removeprefix(f"{name}-").partition("-")[0]
        if not Path("/proc", pid).exists():
            shutil.rmtree(directory, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-{os.getpid()}-"))
