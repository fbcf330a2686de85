"""Measure how long the agent needs to stage a driver, next to cp and sync, without a virtual machine.

The files have random content, and the sizes of the files in Debian's driver packages. As on most hosts, the copies are
on the same file system as the originals: ext4 copies the data, XFS and Btrfs share the extents.
"""

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from agent.host.apply.driver_roots import stage
from agent.model.facts import Library, StagedRoot
from agent.system.files import System
from agent.system.process import host_runner
from integration.bed.measure.bench_script import Measures
from integration.bed.measure.pairs import compared
from integration.bed.process import run
from integration.bed.run_directory import run_directory
from tests.fakes.host import HOSTS

PAIRS = 5
FILE_SYSTEMS = ("ext4", "xfs", "btrfs")
VERSION = "550.163.01"
RECORDED = HOSTS / "debian-13-driver-550" / "files.tsv"
SOURCE = "/driver"
TARGET = "usr/lib/x86_64-linux-gnu"
CHUNK = 1 << 20
IMAGE = 4 << 30
"""Bytes of the sparse image of each file system."""


def measure_staging(pairs: int = PAIRS) -> Measures:
    """Measure pairs of runs on each file system, with a cold page cache."""
    measures: Measures = {}
    for kind in FILE_SYSTEMS:
        ours, bare = [], []
        with _mounted(kind) as mounted:
            files = _make_files(mounted)
            for _ in range(pairs):
                bare.append(_cp(mounted))
                ours.append(_stage(mounted, files))
        measures |= {f"staging_{kind}_seconds": statistics.median(ours)}
        measures |= compared(f"staging_{kind}_vs_cp", ours, bare)
        measures["staging_mib"] = sum(file.size for file in files) >> 20
    return measures


@contextlib.contextmanager
def _mounted(kind: str) -> Iterator[Path]:
    """Yield the mount point of a new file system."""
    directory = run_directory(f"staging-{kind}")
    image, mounted = directory / "image", directory / "mounted"
    mounted.mkdir()
    image.touch()
    os.truncate(image, IMAGE)
    try:
        run([f"mkfs.{kind}", image])
        run(["mount", "-o", "loop", image, mounted])
        try:
            yield mounted
        finally:
            run(["umount", mounted])
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _make_files(mounted: Path) -> tuple[Library, ...]:
    source = mounted / SOURCE.lstrip("/")
    files: list[Library] = []
    source.mkdir()
    for line in RECORDED.read_text().splitlines():
        kind, path, size = line.split("\t")
        if kind == "link" or "/i386-linux-gnu/" in path:
            continue
        file = source / str(len(files))
        with file.open("wb") as writing:
            for start in range(0, int(size), CHUNK):
                writing.write(os.urandom(min(CHUNK, int(size) - start)))
        file.chmod(0o644)
        found = file.stat()
        target, real = f"{TARGET}/{file.name}", f"{SOURCE}/{file.name}"
        files.append(Library(target, real, "", found.st_size, found.st_mtime_ns, executable=False, text=""))
    return tuple(files)


def _stage(mounted: Path, files: tuple[Library, ...]) -> float:
    system = System(host_runner, str(mounted))
    _cold_cache()
    begun = time.monotonic()
    stage(StagedRoot(0, "nvidia", VERSION, files), system)
    seconds = time.monotonic() - begun
    shutil.rmtree(mounted / "var")
    return seconds


def _cp(mounted: Path) -> float:
    copy = mounted / "copy"
    _cold_cache()
    begun = time.monotonic()
    run(["cp", "--recursive", "--reflink=auto", mounted / SOURCE.lstrip("/"), copy])
    # As the agent's copy, this one must outlast a power cut.
    run(["sync", "--file-system", copy])
    seconds = time.monotonic() - begun
    shutil.rmtree(copy)
    return seconds


def _cold_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
