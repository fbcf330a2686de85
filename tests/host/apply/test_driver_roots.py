"""Staging a driver root while somebody can write to its sources, and what is recorded."""

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from agent.host.apply.driver_roots import stage
from agent.model.device import FileIdentity
from agent.model.errors import AgentError
from agent.model.facts import StagedRoot
from agent.model.paths import STAGING, TREES
from agent.system.copy import Copies
from agent.system.files import System
from agent.system.process import host_runner
from tests.fakes.facts import library
from tests.fakes.host import Host
from tests.fakes.user_space import MAIN, VERSION, cache_of, put, user_space

SOURCE, SECRET = "/srv/nvidia/libcuda.so.570.211.01", "/etc/shadow"


class Exchanging(Host):
    """A host where a link to a secret replaces a library when its copy begins, and the library returns afterwards."""

    def make_directory(self, path: str) -> None:
        super().make_directory(path)
        if path.startswith(f"{STAGING}/0"):
            os.rename(f"{self.root}{SOURCE}", f"{self.root}{SOURCE}.aside")
            os.symlink(os.path.relpath(SECRET, os.path.dirname(SOURCE)), f"{self.root}{SOURCE}")

    def identity(self, path: str, *, follow: bool = True) -> FileIdentity:
        aside = f"{self.root}{SOURCE}.aside"
        if os.path.exists(aside):
            os.rename(aside, f"{self.root}{SOURCE}")
        return super().identity(path, follow=follow)


class Upgrading(Host):
    """A host where another driver of the same size is written into a library while it is copied."""

    def copy(self, reading: BinaryIO, target: str, mode: int, copies: Copies) -> None:
        super().copy(reading, target, mode, copies)
        Path(self.full_path(SOURCE)).write_text("LIBRARY")


def test_the_copying_says_how_far_it_is(host: Host) -> None:
    """Four times at most, however many files there are; the other calls are signs of life."""
    files = []
    for number in range(8):
        host.file(f"{SOURCE}{number}", "x" * (1 << 20))
        seen = host.identity(f"{SOURCE}{number}")
        files.append(library(f"lib{number}.so", f"{SOURCE}{number}", size=1 << 20, mtime_ns=seen.mtime_ns))
    told: list[str] = []
    stage(StagedRoot(0, "nvidia", VERSION, tuple(files)), host, told.append)
    assert [each for each in told if each] == [
        f"driver {VERSION}: staged {done} of 8 MiB ({percent} %)"
        for done, percent in ((2, 25), (4, 50), (6, 75), (8, 100))
    ]
    assert told.count("") >= 4


def test_a_file_of_another_size_or_time_is_not_copied(host: Host) -> None:
    host.file(SOURCE, "library")
    seen = host.identity(SOURCE)
    for size, mtime_ns in ((6, seen.mtime_ns), (7, seen.mtime_ns + 1)):
        root = StagedRoot(0, "nvidia", VERSION, (library("libcuda.so", SOURCE, size=size, mtime_ns=mtime_ns),))
        with pytest.raises(AgentError, match=f"{SOURCE}: changed while it was staged"):
            stage(root, host)
        assert host.entries(f"{STAGING}/0") == ()


@pytest.mark.parametrize("kind", [Exchanging, Upgrading])
def test_a_file_that_changes_while_it_is_copied_is_not_used(tmp_path: Path, kind: type[Host]) -> None:
    """Its copy may have parts of both drivers, or be a secret of the library's size and time, which only root reads."""
    host = kind(tmp_path)
    host.file(SOURCE, "library")
    host.file(SECRET, "secret!")
    (tmp_path / SECRET.lstrip("/")).chmod(0o600)
    staged = library("libcuda.so", SOURCE, size=7, mtime_ns=host.identity(SOURCE).mtime_ns)
    with pytest.raises(AgentError, match=f"{SOURCE}: changed while it was staged"):
        stage(StagedRoot(0, "nvidia", VERSION, (staged,)), host)
    assert host.entries(TREES) == ()
    copies = Path(f"{tmp_path}{STAGING}").rglob("*.so")
    assert [path.read_text() for path in copies] == (["library"] if kind is Upgrading else [])


class ReadByALink(Host):
    """A host where a link to a secret replaces a file after its mode was checked."""

    swapped = ""

    def identity(self, path: str, *, follow: bool = True) -> FileIdentity:
        found = super().identity(path, follow=follow)
        if path == self.swapped:
            os.unlink(f"{self.root}{path}")
            os.symlink(os.path.relpath(SECRET, os.path.dirname(path)), f"{self.root}{path}")
        return found


def test_a_secret_is_not_quoted_as_a_librarys_path(tmp_path: Path) -> None:
    """Everybody can read a problem, which quotes what OpenCL's files name."""
    host = ReadByALink(tmp_path)
    host.swapped = "/srv/data/OpenCL/vendors/nvidia.icd"
    put(host, "/srv/lib")
    host.file(host.swapped, "libnvidia-opencl.so.1\n")
    host.file(SECRET, "root:$6$salt/hash:20000::::::\n")
    (tmp_path / SECRET.lstrip("/")).chmod(0o600)
    host.loader_cache(cache_of(*(f"/srv/lib/{name}.so.1" for name in MAIN)))
    found = user_space(host, VERSION, library_directories=["/srv/lib"], data_directories=["/srv/data"])
    assert host.read_link(host.swapped), "it was read after that"
    assert "hash" not in repr(found)
    assert found.version == VERSION


def test_only_regular_files_that_everybody_can_read_are_opened(tmp_path: Path) -> None:
    system = System(host_runner, str(tmp_path))
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_text("content")
    (tmp_path / "real/file").chmod(0o644)
    (tmp_path / "real/secret").write_text("secret")
    (tmp_path / "real/secret").chmod(0o640)
    (tmp_path / "real/link").symlink_to("file")
    (tmp_path / "directory").symlink_to("real")
    os.mkfifo(tmp_path / "real/fifo", 0o644)
    before = len(os.listdir("/proc/self/fd"))
    with system.open_public("/real/file") as reading:
        assert reading.read() == b"content"
    errors = {"/real/secret": errno.EINVAL, "/real/link": errno.ELOOP, "/directory/file": errno.ELOOP}
    for path, number in {**errors, "/real/fifo": errno.EINVAL, "/real": errno.EINVAL}.items():
        with pytest.raises(OSError, match=path) as raised:
            system.open_public(path)
        assert raised.value.errno == number, path
    with pytest.raises(FileNotFoundError):
        system.open_public("/real/none")
    assert len(os.listdir("/proc/self/fd")) == before
