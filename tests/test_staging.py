"""Staging a driver root: what somebody does meanwhile who can write where it is taken from, and what is recorded."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import ApplyError
from agent.facts import Library, StagedRoot
from agent.identity import FileIdentity
from agent.observe.staged import observe_staged
from agent.paths import HOST_NVIDIA, MANIFESTS, REMOVED, STAGING, origin_file
from agent.staging import remove_root, stage
from agent.system.files import System
from agent.system.host_runner import host_runner
from tests.recorded import Host
from tests.test_driver_places import VERSION, put
from tests.test_nvidia_libraries import MAIN, cache_of, user_space

SOURCE, SECRET = "/srv/nvidia/libcuda.so.570.211.01", "/etc/shadow"


class Exchanging(Host):
    """Somebody puts a link to a secret in a library's place as its copy begins, and the library back after it."""

    def make_directory(self, path: str) -> None:
        super().make_directory(path)
        if path.startswith(f"{STAGING}/0"):
            os.rename(f"{self.root}{SOURCE}", f"{self.root}{SOURCE}.aside")
            os.symlink(os.path.relpath(SECRET, os.path.dirname(SOURCE)), f"{self.root}{SOURCE}")

    def identity(self, path: str) -> FileIdentity:
        aside = f"{self.root}{SOURCE}.aside"
        if os.path.exists(aside):
            os.rename(aside, f"{self.root}{SOURCE}")
        return super().identity(path)


def test_a_link_that_is_there_for_a_moment(tmp_path: Path) -> None:
    """The file that it leads to has the library's size and time, and is for root alone."""
    host = Exchanging(tmp_path)
    host.file(SOURCE, "library")
    host.file(SECRET, "secret!")
    (tmp_path / SECRET.lstrip("/")).chmod(0o600)
    library = Library("libcuda.so", SOURCE, size=7, mtime_ns=host.identity(SOURCE).mtime_ns)
    with pytest.raises(ApplyError, match="changed while it was staged"):
        stage(StagedRoot(0, "nvidia", VERSION, (library,)), host)
    copies = [path for place in (STAGING, HOST_NVIDIA) for path in Path(f"{tmp_path}{place}").rglob("*.so")]
    assert copies == []


def test_another_file_of_another_size_or_time_is_not_copied(host: Host) -> None:
    host.file(SOURCE, "library")
    seen = host.identity(SOURCE)
    for size, mtime_ns in ((6, seen.mtime_ns), (7, seen.mtime_ns + 1)):
        root = StagedRoot(0, "nvidia", VERSION, (Library("libcuda.so", SOURCE, size=size, mtime_ns=mtime_ns),))
        with pytest.raises(ApplyError, match=f"{SOURCE}: changed while it was staged"):
            stage(root, host)
        assert host.entries(f"{STAGING}/0") == ()


class ReadByALink(Host):
    """Somebody puts a link to a secret in place of a file, after its mode was looked at."""

    swapped = ""

    def identity(self, path: str) -> FileIdentity:
        found = super().identity(path)
        if path == self.swapped:
            os.unlink(f"{self.root}{path}")
            os.symlink(os.path.relpath(SECRET, os.path.dirname(path)), f"{self.root}{path}")
        return found


def test_a_secret_is_not_told_as_a_path_of_a_library(tmp_path: Path) -> None:
    """A problem is for everybody to read, and cites what OpenCL's files name."""
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


def test_what_is_opened_is_a_plain_file_for_everybody(tmp_path: Path) -> None:
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
    refused = {"/real/secret": errno.EINVAL, "/real/link": errno.ELOOP, "/directory/file": errno.ELOOP}
    for path, number in {**refused, "/real/fifo": errno.EINVAL, "/real": errno.EINVAL}.items():
        with pytest.raises(OSError, match=path) as raised:
            system.open_public(path)
        assert raised.value.errno == number, path
    with pytest.raises(FileNotFoundError):
        system.open_public("/real/none")
    assert len(os.listdir("/proc/self/fd")) == before


# ---- where it came from


@pytest.fixture
def staged(host: Host) -> Host:
    host.file(SOURCE, "library")
    library = Library("libcuda.so", SOURCE, size=7, mtime_ns=host.identity(SOURCE).mtime_ns)
    stage(StagedRoot(0, "nvidia", VERSION, (library,), place="NixOS"), host)
    return host


def test_the_place_is_recorded_beside_the_manifest(staged: Host) -> None:
    """Which is as releases before have it: they refuse what they do not know."""
    (root,) = observe_staged(staged).roots
    assert root.place == "NixOS"
    assert "NixOS" not in staged.read_text(f"{MANIFESTS}/0.json")
    assert replace(root, place="") == root, "what it is does not depend on it"
    staged.remove(origin_file(0))
    assert [each.place for each in observe_staged(staged).roots] == [""]
    assert observe_staged(staged).problems == ()


@pytest.mark.parametrize("content", ["", "{}", '{"version": 2, "place": "NixOS", "manifest": ""}', b"\xff", "[" * 9999])
def test_a_record_that_cannot_be_used_costs_no_driver_root(staged: Host, content: str | bytes) -> None:
    staged.file(origin_file(0), content)
    found = observe_staged(staged)
    assert ([each.place for each in found.roots], found.spoiled) == ([""], ())
    assert [each.startswith(origin_file(0)) for each in found.problems] == [True]


def test_a_record_that_another_release_left_behind_is_not_believed(staged: Host) -> None:
    """It removed driver root 0 and staged another one as 0, and knows of no record."""
    old = staged.read(origin_file(0))
    for path in (f"{MANIFESTS}/0.json", origin_file(0), f"{HOST_NVIDIA}/0"):
        staged.remove_tree(path)
    library = Library("libother.so", SOURCE, size=7, mtime_ns=staged.identity(SOURCE).mtime_ns)
    stage(StagedRoot(0, "nvidia", VERSION, (library,)), staged)
    assert not staged.exists(origin_file(0)), "nothing to record"
    staged.write(origin_file(0), old)
    assert [each.place for each in observe_staged(staged).roots] == [""]


def test_the_record_goes_with_its_driver_root(staged: Host) -> None:
    staged.command("rm", "--recursive", "--force", "--one-file-system", "--", f"{REMOVED}/0")
    remove_root(0, staged)
    assert staged.entries(MANIFESTS) == ()
