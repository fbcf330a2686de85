"""Observes paths below a root prefix, so that tests can observe recorded hosts.

A failed observation raises OSError. It is never taken for "no" or "absent".
"""

import errno
import os
import re
import stat
from collections.abc import Callable
from typing import BinaryIO, NamedTuple, Self

LINK_OF_PROCESS = re.compile(r"/proc/[0-9]+/")
"""Matches the start of the path of a link below the directory of a process, such as /proc/1/root (proc(5))."""
LINK_LIMIT = 40
"""Symbolic links that are followed in one path, like the kernel's MAXSYMLINKS."""

NONEXISTENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""errno values of stat(2) for a path where nothing exists or can exist."""


class Access(NamedTuple):
    """An access to a path."""

    path: str
    """The whole path, with the root prefix."""
    follow: bool
    """Whether a link in the last component is followed."""
    inside: bool
    """Whether the content or the ACL of a directory is read. Otherwise, only its type, mode and owner matter."""


class Rooted:
    """The file system below `root`: absolute paths, also those in links, are relative to it."""

    _note: Callable[[Access], None] | None = None
    """Called with each access; see `noting`."""

    def __init__(self, root: str = "/") -> None:
        self.root = root.rstrip("/") or "/"

    def below(self, directory: str) -> Self:
        """Return a copy of this object with `directory` as its root. No link leads out of that root. Raises OSError."""
        # Imported here: the machine half never needs it.
        import copy

        root = self._noted(self._below_root(self._resolve(directory)), follow=False)
        os.lstat(root)
        inner = copy.copy(self)
        inner.root = root.rstrip("/") or "/"
        return inner

    def noting(self, note: Callable[[Access], None]) -> Self:
        """Return a copy of this object that calls `note` before each access."""
        # Imported here: the machine half never needs it.
        import copy

        inner = copy.copy(self)
        inner._note = note
        return inner

    def exists(self, path: str) -> bool:
        """Return whether the path exists. A dangling link exists."""
        return self._status(path, follow=False) is not None

    def is_directory(self, path: str, *, follow: bool = True) -> bool:
        """Return whether the path is a directory or, with `follow`, a link to one."""
        found = self._status(path, follow=follow)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def is_file(self, path: str) -> bool:
        """Return whether the path is a regular file, or a link to one."""
        found = self._status(path)
        return found is not None and stat.S_ISREG(found.st_mode)

    def is_mount(self, path: str) -> bool:
        """Return whether a file system, or a file of another file system, is mounted at the path."""
        found, above = self._status(path, follow=False), self._status(os.path.dirname(path) or "/")
        if found is None or above is None or stat.S_ISLNK(found.st_mode):
            return False
        # `/` is always a mount, and is the only directory that is its own parent.
        return found.st_dev != above.st_dev or found.st_ino == above.st_ino

    def read_link(self, path: str) -> str | None:
        """Return a symbolic link's text; None if the path is not a link or does not exist."""
        return _link_text(self._at(path, follow=False))

    def links(self, path: str) -> dict[str, str | None]:
        """Return what `read_link` returns for each entry of a directory, by name.

        Each link takes one system call; other entries take none.
        """
        with os.scandir(self._noted(self._at(path), follow=True, inside=True)) as entries:
            return {entry.name: _link_text(entry.path) if entry.is_symlink() else None for entry in entries}

    def real_path(self, path: str) -> str:
        """Return the path with its links resolved below the root. Raises OSError if it does not exist.

        Raises OSError (EXDEV) if a link such as /proc/PID/root is on the path: it leads to what that process sees.
        """
        resolved = self._resolve(path, of_processes=False)
        os.lstat(self._noted(self._below_root(resolved), follow=False))
        return resolved

    def leads_to_something(self, path: str) -> bool:
        """Return whether something exists behind a path that a pod may have chosen. A dangling link leads to nothing.

        The kernel must not resolve the path: below /proc/PID/root, it may lead to a file system that never answers. So
        a path through such a link counts as leading to nothing. Raises OSError if the answer is unknown.
        """
        try:
            return bool(self.real_path(path))
        except ValueError:
            # The path contains a null character.
            return False
        except OSError as error:
            if error.errno in (*NONEXISTENT, errno.EXDEV):
                return False
            raise

    def link_inode(self, path: str) -> int | None:
        """Return the inode number of the path, of the link itself if it is a link; None if it does not exist."""
        try:
            return os.lstat(self._at(path, follow=False)).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return None

    def birth(self, path: str) -> int:
        """Return when the path was made, in nanoseconds since the epoch; 0 if the file system does not record that.

        Links are not followed. A rename does not change that time. Raises OSError.
        """
        # Imported here: few runs need it, and ctypes slows the machine half's start.
        from agent.system.statx import birth

        return birth(self._at(path, follow=False))

    def link_count(self, path: str) -> int:
        """Return how many hard links a file has; 0 for a mounted file whose source was removed. Follows no links."""
        return os.lstat(self._at(path, follow=False)).st_nlink

    def owner(self, path: str) -> tuple[int, int, int]:
        """Return mode (with the file type), user id and group id. Links are not followed. Raises OSError."""
        status = os.lstat(self._at(path, follow=False))
        return status.st_mode, status.st_uid, status.st_gid

    def has_acl(self, path: str) -> bool:
        """Return whether the file has an ACL (acl(5)).

        If so, the group's bits in the file's mode are the mask of the ACL, and do not say what the group may do.
        """
        try:
            place = self._noted(self._at(path, follow=False), follow=False, inside=True)
            os.getxattr(place, "system.posix_acl_access", follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
                return False
            raise
        return True

    def open_public(self, real_path: str) -> BinaryIO:
        """Open a world-readable file without following links (agent.system.public_files)."""
        # Imported here: the machine half seldom needs it.
        from agent.system.public_files import open_public

        return open_public(self._below_root(real_path))

    def _status(self, path: str, *, follow: bool = True) -> os.stat_result | None:
        """Return the status; None if the path does not exist. Raises OSError if that is unknown."""
        try:
            return os.stat(self._at(path, follow=follow), follow_symlinks=follow)
        except ValueError:
            # A path from a configuration or a document may contain a null character, which no file name has.
            return None
        except OSError as error:
            if error.errno in NONEXISTENT:
                return None
            raise

    def _below_root(self, path: str) -> str:
        return path if self.root == "/" else self.root + path

    def _at(self, path: str, *, follow: bool = True) -> str:
        """Return the path with the root prefix, and with links resolved below the root.

        Without `follow`, a link in the last component stays. If the root is /, the path is returned unchanged.
        """
        if self.root == "/":
            return self._noted(path, follow=follow)
        if follow:
            return self._noted(self._below_root(self._resolve(path)), follow=False)
        place = os.path.join(self._resolve(os.path.dirname(path)), os.path.basename(path))
        return self._noted(self._below_root(place), follow=False)

    def _noted(self, place: str, *, follow: bool, inside: bool = False) -> str:
        if self._note:
            self._note(Access(place, follow, inside))
        return place

    def _resolve(self, path: str, *, of_processes: bool = True) -> str:
        """Return the path with links resolved; absolute links lead to a path below the root. The path need not exist.

        Without `of_processes`, raises OSError (EXDEV) for links such as /proc/PID/root.
        """
        # This is the innermost loop of each pass, so readlink is its only system call for a component.
        prefix, note = "" if self.root == "/" else self.root, self._note
        done, remaining, links = "", [part for part in reversed(path.split("/")) if part], 0
        while remaining:
            part = remaining.pop()
            if part in (".", ".."):
                done = done.rpartition("/")[0] if part == ".." else done
                continue
            here = f"{done}/{part}"
            if note:
                note(Access(prefix + here, follow=False, inside=False))
            try:
                target = os.readlink(prefix + here)
            except OSError:
                done = here
                continue
            links += 1
            if not of_processes and LINK_OF_PROCESS.match(here):
                raise OSError(errno.EXDEV, "leads through /proc to files of another process", path)
            if links > LINK_LIMIT:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            remaining += [each for each in reversed(target.split("/")) if each]
            done = "" if target.startswith("/") else done
        return done or "/"


def _link_text(place: str) -> str | None:
    try:
        return os.readlink(place)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
            return None
        raise
