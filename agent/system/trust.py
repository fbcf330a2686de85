"""Checks that only root can change a file. Also checks that a file is public before root copies it for all machines."""

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

from agent.model.device import FileIdentity
from agent.model.facts import Absent, Broken, Unseen
from agent.system.files import LINK_LIMIT, NOT_FOUND, UNUSABLE, System

ROOT = 0
"""The user id and the group id of root."""


def untrusted_component(
    system: System, path: str, *, any_last_owner: bool = False, trusted: Collection[int] = (ROOT,)
) -> str:
    """Find the first component of a path that is under the control of users other than root.

    Return a sentence on that component; empty if there is none. Links are followed. The check ends at a missing
    component, and at a file: `file_fault` checks files. With `any_last_owner`, any user may own the last component, if
    only root can replace it. `trusted` has the ids of users who count as root. Raises OSError if a component could not
    be observed.
    """
    # Why users other than root can write in the directory that was checked last; empty if they cannot.
    writable_by_others = ""
    try:
        for here, mode, uid, gid, last in _walk(system, path):
            link = stat.S_ISLNK(mode)
            if any_last_owner and last and not link:
                return writable_by_others if uid not in trusted else ""
            if not link and not stat.S_ISDIR(mode):
                return ""
            if writable_by_others and link:
                return writable_by_others
            # A link's owner cannot change it without write permission in its directory.
            if uid not in trusted and not link:
                return f"{here} belongs to user {uid}, not to root"
            writable_by_others = ""
            if not link and _others_write(system, here, mode, gid):
                writable_by_others = f"users other than root can write in {here} (mode {stat.S_IMODE(mode):04o})"
                # In a sticky directory such as /nix/store, other users cannot replace root's directories. But they may
                # have made a link there, so a link in it is refused above.
                if last or not mode & stat.S_ISVTX:
                    return writable_by_others
    except OSError as error:
        if error.errno not in NOT_FOUND:
            raise
    return ""


def path_components(system: System, path: str) -> tuple[str, ...]:
    """Return each directory and link on a path, and the file or directory that the path leads to. Raises OSError."""
    return tuple(here for here, *_ in _walk(system, path))


def _others_write(system: System, path: str, mode: int, gid: int) -> bool:
    """Return whether users other than root can write. Root's group is trusted unless the file has an ACL."""
    return bool(mode & stat.S_IWOTH) or (bool(mode & stat.S_IWGRP) and (gid != ROOT or system.has_acl(path)))


def _walk(system: System, path: str) -> Iterator[tuple[str, int, int, int, bool]]:
    """Yield path, mode, user id and group id of each component, from / on, and whether it is the last. Follow links."""
    here, remaining, links = "/", _parts(path), 0
    while True:
        mode, uid, gid = system.owner(here)
        yield here, mode, uid, gid, not remaining
        if stat.S_ISLNK(mode):
            links += 1
            if links > LINK_LIMIT:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = system.read_link(here) or ""
            remaining = _parts(target) + remaining
            here = "/" if target.startswith("/") else os.path.dirname(here)
        if not remaining:
            return
        part = remaining.pop(0)
        here = os.path.dirname(here) if part == ".." else os.path.join(here, part)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


class PathTrust:
    """Checks that only root controls directories below one root prefix, and records those that it refuses."""

    def __init__(self, system: System, *, checked: bool = True) -> None:
        """If not `checked`, permit every directory."""
        self._system, self._checked = system, checked
        self.refused: dict[str, dict[str, None]] = {}
        """The directories that were refused, by reason."""

    def permits(self, directory: str, entry: str = "") -> bool:
        """Return whether only root controls a directory or, if given, `entry`, a path in that directory.

        If not, record the refusal in `refused`. If only `entry` is at fault, and the directory itself is fine, record
        only the links in the directory as refused. Raises OSError.
        """
        why = untrusted_component(self._system, entry or directory) if self._checked else ""
        if why:
            whole_directory = not entry or untrusted_component(self._system, directory)
            self.refused.setdefault(why, {})[directory if whole_directory else f"links in {directory}"] = None
        return not why


def settings_fault(system: System, path: str) -> str:
    """Return why a user other than root and the user of this process could have written a settings file.

    Empty if no such user could. Raises OSError.
    """
    real, trusted = system.real_path(path), (ROOT, os.geteuid())
    directories = (system.real_path(os.path.dirname(path)), os.path.dirname(real))
    for place in dict.fromkeys((*directories, real)):
        mode, uid, gid = system.owner(place)
        if uid not in trusted:
            return f"{place} belongs to user {uid}: run `chown root:root {place}`"
        # In a sticky directory other users cannot replace root's files.
        sticky = stat.S_ISDIR(mode) and mode & stat.S_ISVTX
        if not sticky and _others_write(system, place, mode, gid):
            return (
                f"users other than root can write to {place} (mode {stat.S_IMODE(mode):04o}): run `chmod go-w {place}`"
            )
    # A user who can rename a directory further up, or one above a link on the path, can replace the file.
    return untrusted_component(system, path, any_last_owner=True, trusted=trusted)


def file_fault(system: System, real_path: str, *, root_owned: bool) -> str:
    """Return why a file must not be copied; empty if it may be.

    The file must be readable by all users and, with `root_owned`, writable only by root. Raises OSError.
    """
    mode, uid, gid = system.owner(real_path)
    if not real_path.isprintable():
        return "its path has characters that no driver file has"
    if not stat.S_ISREG(mode):
        return "it is not a regular file"
    if not mode & stat.S_IROTH:
        return f"not every user can read it (mode {stat.S_IMODE(mode):04o})"
    if root_owned and uid:
        return f"it belongs to user {uid}, not to root"
    if root_owned and _others_write(system, real_path, mode, gid):
        return f"users other than root can write to it (mode {stat.S_IMODE(mode):04o})"
    return ""


# Turns failed observations into facts (Absent, Broken or Unseen), or treats a missing directory as an empty one.

T = TypeVar("T")


def read_seen(read: Callable[[str], T], path: str) -> T | Absent | Broken | Unseen:
    """Return what `read` returns for the path, or the fact that its OSError stands for."""
    try:
        return read(path)
    except OSError as error:
        return classify_error(path, error)


def classify_error(path: str, error: OSError) -> Absent | Broken | Unseen:
    """Return the fact that an OSError at a path stands for."""
    if error.errno in NOT_FOUND:
        return Absent(f"{path}: no such file")
    if error.errno in UNUSABLE:
        return Broken(f"{path}: {error.strerror}")
    return Unseen(f"{path}: {error.strerror or error}")


def entries_if_present(system: System, directory: str) -> tuple[str, ...]:
    """Return the sorted names in a directory; none if there is no such directory. Raises OSError."""
    try:
        return system.entries(directory)
    except (FileNotFoundError, NotADirectoryError):
        return ()


# Logs and counts files of the agent's own state that it discards because it cannot use them.

_counts: Counter[str] = Counter()
_known: dict[str, FileIdentity | None] = {}
"""The damaged files that were counted already: by path, the identity that the file had then; None if it was unknown.
Some of these files stay until the agent writes new ones."""


def count(path: str, system: System) -> bool:
    """Count a discarded file without a log message, because the caller reports it.

    While the same file stays, later calls do not count it again. Return whether this call has counted the file.
    """
    place = system.full_path(path)
    try:
        identity = system.identity(path, follow=False)
    except OSError:
        identity = None
    if place in _known and _known[place] == identity:
        return False
    _known[place] = identity
    _counts[os.path.basename(path)] += 1
    return True


def discard(path: str, why: str, system: System) -> None:
    """Count and log a discarded file, but only once while the same file stays. The pass goes on without its content."""
    if count(path, system):
        _warn(path, why)


def discarded() -> Mapping[str, int]:
    """Return how many files were discarded since this process started, by file name."""
    return dict(_counts)


def write_record(system: System, path: str, content: bytes, mode: int = 0o644) -> None:
    """Write a file of the agent as `System.write` does. If there is a directory at `path`, move it aside first."""
    if system.is_directory(path):
        _counts[os.path.basename(path)] += 1
        _warn(path, f"a directory was in its place; moved it to {system.put_aside(path)}")
    system.write(path, content, mode)


def _warn(path: str, why: str) -> None:
    # Imported here, because otherwise every command would load it.
    import logging

    logging.getLogger(__name__).warning("discarding %s: %s", path, why)
