"""Copies from one file system to another, with two real ones if this host has them."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from agent.system import copy
from agent.system.files import System
from agent.system.process import host_runner

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on a different file system from `tmp_path`'s."""
    if not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip(f"{SHARED_MEMORY} is no file system of its own here")
    with TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        yield Path(directory)


def test_from_one_file_system_to_another(tmp_path: Path, elsewhere: Path) -> None:
    """If /var is a file system of its own, the kernel refuses copy_file_range(2)."""
    content = os.urandom(copy.CHUNK) * 3 + b"end"
    for source, target in ((tmp_path, elsewhere), (elsewhere, tmp_path)):
        (source / "library").write_bytes(content)
        with (source / "library").open("rb") as reading, copy.Copies(lambda: None) as copies:
            System(host_runner).copy(reading, str(target / "copy"), 0o644, copies)
        assert (target / "copy").read_bytes() == content


def test_a_file_that_grows_is_not_followed(tmp_path: Path, elsewhere: Path) -> None:
    size = copy.STEP + 1
    with (tmp_path / "log").open("w+b") as growing, (elsewhere / "copy").open("wb") as writing:
        growing.truncate(size)
        copy.copy_content(growing.fileno(), writing.fileno(), lambda: os.truncate(growing.fileno(), 2 * size))
    assert (elsewhere / "copy").stat().st_size == size


def test_a_full_file_system_is_an_error(tmp_path: Path) -> None:
    """The copy is not tried again in another way."""
    (tmp_path / "library").write_bytes(b"library")
    with (
        (tmp_path / "library").open("rb") as reading,
        Path("/dev/full").open("wb") as full,
        pytest.raises(OSError, match=os.strerror(errno.ENOSPC)),
    ):
        copy.copy_content(reading.fileno(), full.fileno(), lambda: None)


def copy_library(system: System, name: str, copies: copy.Copies, mode: int = 0o644) -> None:
    with open(system.full_path("/library"), "rb") as reading:
        system.copy(reading, f"/{name}", mode, copies)


def test_copies_become_durable_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, after the last one was copied, and before the block ends. All are closed then."""
    system, calls = System(host_runner, str(tmp_path)), []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    (tmp_path / "library").write_bytes(b"driver")
    before = len(os.listdir("/proc/self/fd"))
    with copy.Copies(lambda: None) as copies:
        for name in ("one", "two", "three"):
            copy_library(system, name, copies, 0o755)
        assert calls == []
    assert calls == ["one", "two", "three"]
    with copy.Copies(lambda: None) as copies:
        for number in range(copy.OPEN_LIMIT + 10):
            copy_library(system, str(number), copies)
            assert len(os.listdir("/proc/self/fd")) < before + copy.OPEN_LIMIT, "few descriptors for any number"
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o755
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_write_that_fails_late_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies are closed nevertheless."""
    system = System(host_runner, str(tmp_path))
    (tmp_path / "library").write_bytes(b"driver")
    before = len(os.listdir("/proc/self/fd"))

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    copies = copy.Copies(lambda: None)
    for name in ("one", "two"):
        copy_library(system, name, copies)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), copies:
        pass
    assert len(os.listdir("/proc/self/fd")) == before
