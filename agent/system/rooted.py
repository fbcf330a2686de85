"""Paths below one root prefix, so that recorded hosts can be observed."""

import errno
import os
from typing import BinaryIO, Self

LINK_LIMIT = 40
"""Symbolic links followed in one look-up, as the kernel's MAXSYMLINKS."""


class Rooted:
    """Absolute paths mean places below `root`; links are resolved below it too."""

    def __init__(self, root: str = "/") -> None:
        self.root = root.rstrip("/") or "/"

    def below(self, directory: str) -> Self:
        """The same, with a directory of it as the root: no link in there leads out of it. Raises OSError."""
        # Here, as the machine half never does this.
        import copy

        root = self._below_root(self._resolve(directory))
        os.lstat(root)
        inner = copy.copy(self)
        inner.root = root.rstrip("/") or "/"
        return inner

    def owner(self, path: str) -> tuple[int, int, int]:
        """Mode with the type of file, user and group id; of a link its own. Raises OSError."""
        status = os.lstat(self._at(path, follow=False))
        return status.st_mode, status.st_uid, status.st_gid

    def has_acl(self, path: str) -> bool:
        """Whether a list says who else may do what (acl(5)): the group's bits in the mode are its mask then."""
        try:
            os.getxattr(self._at(path, follow=False), "system.posix_acl_access", follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
                return False
            raise
        return True

    def open_public(self, real_path: str) -> BinaryIO:
        """A file that everybody may read, of which no link is followed: see agent.system.public_files."""
        # Here, as the machine half opens none.
        from agent.system.public_files import open_public

        return open_public(self._below_root(real_path))

    def _below_root(self, path: str) -> str:
        return path if self.root == "/" else self.root + path

    def _at(self, path: str, *, follow: bool = True) -> str:
        """The real place of a path: its links resolved below the root, the last component's only with `follow`."""
        if self.root == "/":
            return path
        if follow:
            return self._below_root(self._resolve(path))
        return self._below_root(os.path.join(self._resolve(os.path.dirname(path)), os.path.basename(path)))

    def _resolve(self, path: str) -> str:
        """Like realpath(3), with the root prefix as `/`: a recorded tree's absolute links stay inside it."""
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
