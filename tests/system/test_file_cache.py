"""An observation is repeated after any change that stat(2) shows, and only then."""

import contextlib
import errno
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.system.files import System
from agent.system.process import host_runner
from agent.system.trust import FRESH, FileCache

LATER = FRESH + 1
EARLIER = -3600.0
"""The files' times are in the future, because the clock was set back after they were made."""


class Observation:
    """Reads what is behind a link in a directory, and counts how often."""

    def __init__(self, place: str) -> None:
        self.place, self.count = place, 0
        self.during: Callable[[], object] = lambda: None

    def __call__(self, system: System) -> str:
        self.count += 1
        names = ",".join(system.entries(f"{self.place}/current"))
        found = f"{names} {system.exists(f'{self.place}/new')} {system.real_path(f'{self.place}/current/file')}"
        found += f" {system.has_acl(f'{self.place}/guarded')}"
        self.during()
        return f"{found} {system.owner(f'{self.place}/real')[0]:o} {system.read_text(f'{self.place}/current/file')}"


@pytest.fixture(params=["the host's root", "another root"])
def system(request: pytest.FixtureRequest, tmp_path: Path) -> System:
    for directory in ("real", "other"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "file").write_text(directory)
    (tmp_path / "current").symlink_to("real")
    (tmp_path / "guarded").mkdir()
    (tmp_path / "guarded").chmod(0o775)
    return System(host_runner, "/" if request.param == "the host's root" else str(tmp_path))


@pytest.fixture
def observation(system: System, tmp_path: Path) -> Observation:
    return Observation(str(tmp_path) if system.root == "/" else "")


def get(cache: FileCache, system: System, observation: Observation, key: object = 1) -> str:
    return cache.get("test", key, system, observation, lambda found: bool(found))


def cache(seconds_later: float = LATER) -> FileCache:
    return FileCache(lambda: time.time() + seconds_later)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file's content": lambda tree: (tree / "real/file").write_text("REAL"),
    "a file's content, with the old mtime": lambda tree: rewrite_with_old_mtime(tree / "real/file"),
    "a file replaced": lambda tree: (tree / "other/file").rename(tree / "real/file"),
    "a file removed": lambda tree: (tree / "real/file").unlink(),
    "another name in a directory": lambda tree: (tree / "real/more").write_text(""),
    "what was missing": lambda tree: (tree / "new").write_text(""),
    "a link": lambda tree: replace_link(tree / "current", "other"),
    "a directory's mode": lambda tree: (tree / "real").chmod(0o777),
    "an access control list, which leaves the mode as it is": lambda tree: add_acl(tree / "guarded"),
    "a directory renamed behind a link": lambda tree: swap(tree / "real", tree / "other"),
}


def rewrite_with_old_mtime(path: Path) -> None:
    before = path.stat()
    path.write_text("REAL")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def add_acl(path: Path) -> None:
    """Add an entry for user 1000, as acl_to_any_text(3) would show `user:1000:rwx` (linux/posix_acl_xattr.h)."""
    nobody = 0xFFFFFFFF
    entries = ((0x01, 7, nobody), (0x02, 7, 1000), (0x04, 7, nobody), (0x10, 7, nobody), (0x20, 5, nobody))
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(path, "system.posix_acl_access", content)
    assert path.stat().st_mode & 0o777 == 0o775


def replace_link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def swap(one: Path, other: Path) -> None:
    one.rename(one.with_name("aside"))
    other.rename(one)


@pytest.mark.parametrize("seconds_later", [LATER, EARLIER])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_seen(
    system: System,
    observation: Observation,
    tmp_path: Path,
    change: Callable[[Path], object],
    seconds_later: float,
) -> None:
    kept = cache(seconds_later)
    first = get(kept, system, observation)
    assert get(kept, system, observation) == first
    assert observation.count == 1
    time.sleep(0.01)  # more than one tick of the file system's clock
    change(tmp_path)
    with contextlib.suppress(FileNotFoundError):
        get(kept, system, observation)
    assert observation.count == 2


def test_other_names_in_a_directory_that_was_not_listed_do_not_matter(
    system: System, observation: Observation, tmp_path: Path
) -> None:
    """/run gets new names all the time, and components of paths in it are checked."""
    kept = cache(seconds_later=LATER)
    get(kept, system, observation)
    (tmp_path / "unrelated").write_text("")
    get(kept, system, observation)
    assert observation.count == 1


def test_a_directory_that_becomes_a_link_to_itself_is_seen(system: System, tmp_path: Path) -> None:
    """All files stay as they are; only their real path is another."""
    (tmp_path / "above/below").mkdir(parents=True)
    (tmp_path / "above/below/file").write_text("")
    kept, place = cache(), str(tmp_path) if system.root == "/" else ""

    def observe(system: System) -> str:
        return system.real_path(f"{place}/above/below/file")

    before = kept.get("test", 1, system, observe, bool)
    (tmp_path / "above").rename(tmp_path / "moved")
    (tmp_path / "above").symlink_to("moved")
    assert kept.get("test", 1, system, observe, bool) == before.replace("above", "moved")


def test_everything_else_that_the_result_depends_on_is_the_key(system: System, observation: Observation) -> None:
    kept = cache()
    for key in (1, 2, 2, 1):
        get(kept, system, observation, key)
    assert observation.count == 3


def test_a_result_from_files_that_changed_just_before_is_not_kept(system: System, observation: Observation) -> None:
    kept = cache(seconds_later=0)
    get(kept, system, observation)
    get(kept, system, observation)
    assert observation.count == 2


def test_a_result_from_files_that_changed_during_a_long_observation_is_not_kept(
    system: System, observation: Observation
) -> None:
    """They changed before the observation accessed them, long after its begin."""
    clock, count = time.time() - 100, 0
    kept = FileCache(lambda: clock)

    def observe(system: System) -> str:
        nonlocal clock, count
        clock, count = time.time(), count + 1
        return system.read_text(f"{observation.place}/real/file")

    for _ in range(2):
        kept.get("test", 1, system, observe, bool)
        clock = time.time() - 100
    assert count == 2


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_result_is_not_kept_if_something_changed_during_the_observation(
    system: System, observation: Observation, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    kept = cache()
    time.sleep(0.01)
    changes = [change]
    observation.during = lambda: changes.pop()(tmp_path) if changes else None
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            get(kept, system, observation)
    assert observation.count == 2


def test_an_incomplete_result_is_not_kept(system: System, observation: Observation) -> None:
    kept = cache()
    for _ in range(2):
        kept.get("test", 1, system, observation, lambda found: False)
    assert observation.count == 2


def test_a_result_is_not_kept_if_a_files_state_is_unknown(
    system: System, observation: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with errors: the observation passes over a file that stat(2) fails for."""
    real = os.stat

    def stat(path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == str(tmp_path / "broken"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, follow_symlinks=follow_symlinks)

    def observe(system: System) -> str:
        with contextlib.suppress(OSError):
            system.exists(f"{observation.place}/broken")
        return observation(system)

    kept = cache()
    monkeypatch.setattr(os, "stat", stat)
    for _ in range(2):
        kept.get("test", 1, system, observe, lambda found: True)
    assert observation.count == 2


def test_files_that_do_not_answer_are_observed_again(
    system: System, observation: Observation, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, hanging, released = cache(), threading.Event(), threading.Event()
    kept.limit = 0.05
    first, real = get(kept, system, observation), os.stat

    def stat(path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        if threading.current_thread() is not threading.main_thread() and not hanging.is_set():
            hanging.set()
            released.wait(30)
        return real(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "stat", stat)
    try:
        assert get(kept, system, observation) == first
        assert hanging.is_set()
        assert observation.count == 2
    finally:
        released.set()


def test_each_path_is_looked_at_once(
    system: System, observation: Observation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = cache()
    # A file that has changed just now may change once more within the same tick of the clock, and is observed again.
    time.sleep(0.05)
    get(kept, system, observation)
    looked, status = list[str](), os.stat

    def noted(path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        looked.append(path)
        return status(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "stat", noted)
    get(kept, system, observation)
    assert observation.count == 1
    places = [each for each in looked if each != str(tmp_path / "current")]
    assert len(places) > 3
    assert sorted(places) == sorted({*places}), "of the link itself and of what is behind it"
