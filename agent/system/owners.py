"""Who could have put a file where it is: what root copies for all machines has to be root's, and no secret."""

import errno
import os
import stat
from collections.abc import Iterator

from agent.system.files import System
from agent.system.looking import NOT_THERE
from agent.system.rooted import LINK_LIMIT

ROOT = 0
"""As user and as group."""


def others_way(system: System, path: str, *, to_it: bool = False) -> str:
    """What on the way to a path, links followed, is another's than root's, in words; empty where nothing is.

    `to_it`: what is at the end of the way may be anybody's that only root can replace.
    The way ends where there is nothing, and before a file, of which `files_fault` tells. Nothing is asked of what is
    behind another's directory. Raises OSError where it could not be looked at.
    """
    shared = ""
    try:
        for here, mode, uid, gid, last in _way(system, path):
            link = stat.S_ISLNK(mode)
            if to_it and last and not link:
                return shared if uid else ""
            if not link and not stat.S_ISDIR(mode):
                return ""
            if shared and link:
                return shared
            # Nobody changes a link but who may write in its directory.
            if uid and not link:
                return f"{here} belongs to user {uid}, not to root"
            shared = ""
            if not link and _others_write(system, here, mode, gid):
                shared = f"others than root may write in {here} (mode {stat.S_IMODE(mode):04o})"
                # In a sticky directory, as /nix/store is, nobody can replace a directory of root's.
                if last or not mode & stat.S_ISVTX:
                    return shared
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
    return ""


def steps(system: System, path: str) -> tuple[str, ...]:
    """Each directory and link on the way to a path, and what is at its end. Raises OSError."""
    return tuple(here for here, *_ in _way(system, path))


def _others_write(system: System, path: str, mode: int, gid: int) -> bool:
    """Root's own group is root, unless a list names others."""
    return bool(mode & stat.S_IWOTH) or (bool(mode & stat.S_IWGRP) and (gid != ROOT or system.has_acl(path)))


def _way(system: System, path: str) -> Iterator[tuple[str, int, int, int, bool]]:
    """Path, mode, user and group id of each directory and link from / on, and whether it is the last one."""
    here, ahead, links = "/", _parts(path), 0
    while True:
        mode, uid, gid = system.owner(here)
        yield here, mode, uid, gid, not ahead
        if stat.S_ISLNK(mode):
            links += 1
            if links > LINK_LIMIT:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = system.read_link(here) or ""
            ahead = _parts(target) + ahead
            here = "/" if target.startswith("/") else os.path.dirname(here)
        if not ahead:
            return
        part = ahead.pop(0)
        here = os.path.dirname(here) if part == ".." else os.path.join(here, part)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


class Ways:
    """Which ways of one system are root's alone. Keeps what is not."""

    def __init__(self, system: System, *, judged: bool = True) -> None:
        """Without `judged`, all of them may be gone."""
        self._system, self._judged = system, judged
        self.refused: dict[str, dict[str, None]] = {}
        """Directories, by why not."""

    def permits(self, directory: str, link: str = "") -> bool:
        """Whether only root may change what is there; with `link`, what that link in it leads to. Raises OSError."""
        why = others_way(self._system, link or directory) if self._judged else ""
        if why:
            whole = not link or others_way(self._system, directory)
            self.refused.setdefault(why, {})[directory if whole else f"links in {directory}"] = None
        return not why


def files_fault(system: System, real_path: str, *, of_root: bool) -> str:
    """Why a file is not for everybody's eyes, or with `of_root` not surely root's; empty where nothing is against it.

    Raises OSError.
    """
    mode, uid, gid = system.owner(real_path)
    if not real_path.isprintable():
        return "the path has characters that no file of a driver has"
    if not stat.S_ISREG(mode):
        return "it is no regular file"
    if not mode & stat.S_IROTH:
        return f"not everybody may read it (mode {stat.S_IMODE(mode):04o})"
    if of_root and uid:
        return f"it belongs to user {uid}, not to root"
    if of_root and _others_write(system, real_path, mode, gid):
        return f"others than root may write it (mode {stat.S_IMODE(mode):04o})"
    return ""
