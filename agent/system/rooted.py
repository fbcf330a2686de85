"""Observes paths below a root prefix, so that tests can observe recorded hosts.

A failed observation is never a No: it raises OSError.
"""

import errno
import os
import stat
from typing import BinaryIO, Self

LINK_LIMIT = 40
"""Symbolic links followed in one look-up, as the kernel's MAXSYMLINKS."""

NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""errno values of stat(2) for a path where nothing is or can be."""


class Rooted:
    """Absolute paths mean places below `root`; links are resolved below it too."""

    def __init__(self, root: str = "/") -> None:
        self.root = root.rstrip("/") or "/"

    def below(self, directory: str) -> Self:
        """Return the same, with a directory as the root: no link in there leads out of it. Raises OSError."""
        # Imported here: the machine half never does this.
        import copy

        root = self._below_root(self._resolve(directory))
        os.lstat(root)
        inner = copy.copy(self)
        inner.root = root.rstrip("/") or "/"
        return inner

    def exists(self, path: str) -> bool:
        """Return whether anything is there; a dangling link counts."""
        return self._status(path, follow=False) is not None

    def is_directory(self, path: str) -> bool:
        """Return whether it is a directory, links followed within the root."""
        found = self._status(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def is_file(self, path: str) -> bool:
        """Return whether it is a regular file, links followed within the root."""
        found = self._status(path)
        return found is not None and stat.S_ISREG(found.st_mode)

    def is_mount(self, path: str) -> bool:
        """Return whether a file system, or a single file of one, is mounted there."""
        found, above = self._status(path, follow=False), self._status(os.path.dirname(path) or "/")
        if found is None or above is None or stat.S_ISLNK(found.st_mode):
            return False
        return found.st_dev != above.st_dev or found.st_ino == above.st_ino

    def read_link(self, path: str) -> str | None:
        """Return a symbolic link's text; None for anything else, or nothing."""
        try:
            return os.readlink(self._at(path, follow=False))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
                return None
            raise

    def real_path(self, path: str) -> str:
        """Return the path without symbolic links, resolved below the root. Raises FileNotFoundError if dangling."""
        resolved = self._resolve(path)
        os.lstat(self._below_root(resolved))
        return resolved

    def link_inode(self, path: str) -> int | None:
        """Return the inode number of a symbolic link itself; None if there is none."""
        try:
            return os.lstat(self._at(path, follow=False)).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return None

    def link_count(self, path: str) -> int:
        """Return how many names a file has, links not followed; 0 for a mounted file whose source was removed."""
        return os.lstat(self._at(path, follow=False)).st_nlink

    def owner(self, path: str) -> tuple[int, int, int]:
        """Return mode with file type, user and group id; links are not followed. Raises OSError."""
        status = os.lstat(self._at(path, follow=False))
        return status.st_mode, status.st_uid, status.st_gid

    def has_acl(self, path: str) -> bool:
        """Return whether an ACL grants rights to others (acl(5)): the group's bits in the mode are then its mask."""
        try:
            os.getxattr(self._at(path, follow=False), "system.posix_acl_access", follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
                return False
            raise
        return True

    def open_public(self, real_path: str) -> BinaryIO:
        """Open a world-readable file without following links: see agent.system.public_files."""
        # Imported here: the machine half opens none.
        from agent.system.public_files import open_public

        return open_public(self._below_root(real_path))

    def _status(self, path: str, *, follow: bool = True) -> os.stat_result | None:
        """Return the status, None if nothing is there. Raises OSError if unknown: a failed stat(2) is not a No."""
        try:
            return os.stat(self._at(path, follow=follow), follow_symlinks=follow)
        except ValueError:
            # Text from outside may contain a null character, which no path has.
            return None
        except OSError as error:
            if error.errno in NOTHING:
                return None
            raise

    def _below_root(self, path: str) -> str:
        return path if self.root == "/" else self.root + path

    def _at(self, path: str, *, follow: bool = True) -> str:
        """Return the real place of a path: links resolved below the root, the last component's only with `follow`."""
        if self.root == "/":
            return path
        if follow:
            return self._below_root(self._resolve(path))
        return self._below_root(os.path.join(self._resolve(os.path.dirname(path)), os.path.basename(path)))

    def _resolve(self, path: str) -> str:
        """Resolve like realpath(3), with the root prefix as `/`: a recorded tree's absolute links stay inside it."""
        done, ahead, links = "/", [part for part in path.split("/") if part], 0
        while ahead:
            part = ahead.pop(0)
            if part in (".", ".."):
                done = os.path.dirname(done) if part == ".." else done
                continue
            here = os.path.join(done, part)
            try:
                target = os.readlink(self._below_root(here))
            except OSError:
                done = here
                continue
            links += 1
            if links > LINK_LIMIT:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            ahead = [each for each in target.split("/") if each] + ahead
            done = "/" if target.startswith("/") else done
        return done
