"""Reuses the result of an observation while no file that it was made from has changed.

A change is recognised by what stat(2) says: device, inode, type, mode, owner, size, mtime and ctime. Size and times do
not matter for a directory whose content was not read: /run, for example, gets new names all the time. The state of each
path is noted before the observation accesses it, so that a change during the observation is noticed too.
"""

import math
import os
import stat
import time
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import Struct, field

from agent.system.deadlines import DEVICE_CALL, call_device
from agent.system.files import System
from agent.system.rooted import NONEXISTENT, Access

T = TypeVar("T")

FRESH = 2.0
"""For this many seconds after a change, another change may leave the file with the same times, because a file system's
clock ticks slowly: every 4 ms on ext4, every 2 s on FAT."""

State = tuple[int, ...]
Files = dict[Access, State | None]
"""What `_state` returned for each path, before the observation accessed it."""


class _Kept(Struct, frozen=True):
    """A result that may be used again."""

    key: object
    files: Files
    result: Any


class FileCache(Struct):
    """The last result of each observation, by name."""

    clock: Callable[[], float] = time.time
    """The clock by which file systems set the times of files."""
    limit: float = DEVICE_CALL
    """Seconds for stat(2) of all files: one may be on a network file system."""
    _kept: dict[str, _Kept] = field(default_factory=dict)

    def get(
        self, name: str, key: object, system: System, observe: Callable[[System], T], complete: Callable[[T], bool]
    ) -> T:
        """Return the last result of the observation `name`, or call `observe` if the result may be different by now.

        `observe` gets a System that notes each access to a file. `key` has everything that the result depends on
        besides files. The result is kept only if `complete` returns True for it.
        """
        kept = self._kept.pop(name, None)
        if kept and kept.key == key and self._unchanged(name, kept.files):
            self._kept[name] = kept
            return kept.result  # type: ignore[no-any-return]
        files = Files()

        def note(access: Access) -> None:
            if access not in files:
                files[access] = _state(access, self.clock())

        result = observe(system.noting(note))
        if complete(result) and None not in files.values() and self._unchanged(name, files):
            self._kept[name] = _Kept(key, _without_repeated(files), result)
        return result

    def _unchanged(self, name: str, files: Files) -> bool:
        """Return whether no file has changed. A file system that does not answer in time counts as a change."""

        def compare() -> bool:
            return all(_state(each) == state for each, state in files.items())

        try:
            return call_device(f"the files of {name}", compare, self.limit)
        except OSError:
            return False


def _without_repeated(files: Files) -> Files:
    """Leave out accesses that another one to the same path includes: stat(2) said the same of both, or more of it."""
    kept, said = Files(), dict[str, State | None]()
    for access, state in sorted(files.items(), key=lambda item: (not item[0].inside, item[0].follow)):
        other = said.setdefault(access.path, None)
        if state is None or other is None or other[: len(state)] != state:
            kept[access] = said[access.path] = state
    return kept


def _state(access: Access, now: float = math.inf) -> State | None:
    """Return what stat(2) says; if nothing exists at the path, only the number of the error that says so.

    None if stat(2) fails otherwise, or if the file has changed at about the time `now`: another change might then go
    unnoticed (FRESH).

    If the clock was set back, a file may seem to have changed in the future. That time is as good as one in the past:
    the next change of the file replaces it.
    """
    try:
        found = os.stat(access.path, follow_symlinks=access.follow)
    except OSError as error:
        return (error.errno,) if error.errno in NONEXISTENT else None
    identity = (found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_gid)
    if stat.S_ISDIR(found.st_mode) and not access.inside:
        return identity
    if abs(now - found.st_ctime) < FRESH:
        return None
    return (*identity, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
