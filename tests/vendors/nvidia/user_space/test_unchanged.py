"""A search that may be left out because nothing changed finds what a new search finds, whatever changes."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from agent.host.observe.host import Listing, LoaderCache
from agent.model.facts import CacheEntry, Seen, Unseen, UserSpace
from agent.system.trust import FRESH, FileCache
from agent.vendors.host_vendor import Sources
from agent.vendors.nvidia.user_space import observe_user_space
from tests.fakes.host import Host
from tests.fakes.user_space import cache_of, put

VERSION = "550.163.01"
NEXT = "570.86.10"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
CURRENT = f"{LIBRARIES}/nvidia/current"
CONTAINER = "/run/nvidia/driver"


class Kept(NamedTuple):
    """Searches with the same memory, as the service makes them."""

    host: Host
    cache: FileCache
    loader_cache: LoaderCache

    def search(self, module: str = VERSION) -> UserSpace:
        return self._search(self.cache, module)

    def new_search(self, module: str = VERSION) -> UserSpace:
        return self._search(FileCache(), module)

    def _search(self, cache: FileCache, module: str) -> UserSpace:
        host = self.host

        def entries(root: str) -> Seen[tuple[CacheEntry, ...]]:
            listing = self.loader_cache.read(host, root)
            return listing.entries if isinstance(listing, Listing) else listing

        return observe_user_space(
            Sources(host, host.architecture(), host.pci, host.drm, entries, {}, file_cache=cache), module
        )


@pytest.fixture
def kept(host: Host) -> Kept:
    """Debian's packages, which were searched once; the files count as older than they are."""
    host.load("debian-13-driver-550")
    found = Kept(host, FileCache(lambda: time.time() + FRESH + 1), LoaderCache())
    found.search()
    time.sleep(0.01)  # more than one tick of the file system's clock
    return found


def replace_link(host: Host, path: str, target: str) -> None:
    host.remove_file(path)
    host.symlink(path, target)


def driver_container(host: Host) -> None:
    for name in ("libcuda", "libnvidia-ml"):
        host.file(f"{CONTAINER}/usr/lib64/{name}.so.{NEXT}", size=1000)
    host.file(f"{CONTAINER}/etc/ld.so.cache", "not read by us")
    paths = [f"/usr/lib64/{name}.so.{NEXT}" for name in ("libcuda", "libnvidia-ml")]
    cache = host.full_path(f"{CONTAINER}/etc/ld.so.cache")
    host.command("ldconfig", "-p", "-C", cache, stdout=cache_of(*paths))
    host.command("/sbin/ldconfig", "-p", "-C", cache, stdout=cache_of(*paths))


def firmware_directory(host: Host) -> None:
    host.file(f"/fw/nvidia/{VERSION}/gsp_more.bin", size=9)
    host.file("/sys/module/firmware_class/parameters/path", "/fw\n")


def truncated(host: Host, path: str) -> None:
    os.truncate(host.full_path(path), 17)


CHANGES: dict[str, Callable[[Host], object]] = {
    "a library is written again": lambda host: truncated(host, f"{CURRENT}/libcuda.so.{VERSION}"),
    "a library is removed": lambda host: host.remove_file(f"{LIBRARIES}/libnvidia-glcore.so.{VERSION}"),
    "a library more": lambda host: host.file(f"{CURRENT}/libnvidia-more.so.{VERSION}", size=1000),
    "a link among the alternatives": lambda host: replace_link(
        host, f"{LIBRARIES}/libcuda.so.1", f"/usr/lib/i386-linux-gnu/libcuda.so.{VERSION}"
    ),
    "the loader cache": lambda host: host.loader_cache(cache_of(f"{LIBRARIES}/libnvidia-glcore.so.{VERSION}")),
    "no loader cache": lambda host: host.remove_file("/etc/ld.so.cache"),
    "nvidia-smi not executable": lambda host: os.chmod(host.full_path("/usr/lib/nvidia/current/nvidia-smi"), 0o644),
    "a file that users cannot read": lambda host: os.chmod(host.full_path(f"{CURRENT}/libcuda.so.{VERSION}"), 0o600),
    "firmware": lambda host: host.file(f"/lib/firmware/nvidia/{VERSION}/gsp_more.bin", size=9),
    "another place": lambda host: put(host, "/opt/nvidia/lib64"),
    "a driver container": driver_container,
    "the kernel's directory of firmware": firmware_directory,
    "libcuda is removed": lambda host: host.remove_file(f"{CURRENT}/libcuda.so.{VERSION}"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_seen(kept: Kept, change: Callable[[Host], object]) -> None:
    before = kept.search()
    change(kept.host)
    assert kept.search() == kept.new_search() != before


def test_the_modules_version_is_part_of_the_question(kept: Kept) -> None:
    driver_container(kept.host)
    assert kept.search(NEXT).version == NEXT
    assert kept.search(VERSION).version == VERSION


def test_nothing_is_listed_again_if_nothing_changed(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(host: Host, path: str) -> tuple[str, ...]:
        raise AssertionError(path)

    first = kept.search()
    monkeypatch.setattr(type(kept.host), "entries", entries)
    assert kept.search() == first


@pytest.mark.parametrize("path", [f"{CURRENT}", "/opt/nvidia/lib64"])
def test_a_failed_look_is_repeated(host: Host, path: str) -> None:
    """Also in a place that would not have been used."""
    host.load("debian-13-driver-550")
    put(host, "/opt/nvidia/lib64")
    found = Kept(host, FileCache(lambda: time.time() + FRESH + 1), LoaderCache())
    host.failing[path] = OSError(errno.EIO, os.strerror(errno.EIO), path)
    failed = found.search()
    assert isinstance(failed.version, Unseen) or not failed.other_places
    host.failing.clear()
    assert found.search() == found.new_search() != failed


def test_the_cache_notes_what_it_looked_at_below_other_roots(kept: Kept) -> None:
    driver_container(kept.host)
    kept.search(NEXT)
    Path(kept.host.full_path(f"{CONTAINER}/usr/lib64/libcuda.so.{NEXT}")).unlink()
    assert kept.search(NEXT) == kept.new_search(NEXT)
    assert kept.search(NEXT).version == VERSION
