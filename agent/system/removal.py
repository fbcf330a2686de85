"""Removes directory trees, but never anything through a mount. Every removal of a tree goes through this module.

It also runs on its own: `python3 -IS removal.py PATH...`. So it needs nothing but Python, and works while the agent is
installed or removed. Exit code 1 means that something could not be removed; 3 that something is mounted there.

A path is refused as a whole while /proc/self/mountinfo has a mount at it or below it. What is mounted meanwhile is not
removed either: a directory is opened through its parent's descriptor, and must then be in the parent's mount. The file
system's number (st_dev) would not show that, because it is the same in a bind mount of the same file system.
"""

import errno
import fcntl
import os
import re
import stat
import sys
from collections.abc import Callable

MOUNTS = "/proc/self/mountinfo"
FAILED, MOUNTED = 1, 3
"""Exit codes."""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
NAMES = 1000
"""How many names of one directory are read at once. A directory may have any number."""
LEVELS = 100
"""On how many levels of a tree such names are kept. A tree may have any number of levels."""
GET_FLAGS, SET_FLAGS = 0x80086601, 0x40086602
"""FS_IOC_GETFLAGS and FS_IOC_SETFLAGS (ioctl_iflags(2)), on 64-bit architectures."""
UNREMOVABLE = 0x10 | 0x20
"""FS_IMMUTABLE_FL and FS_APPEND_FL, which `chattr +i` and `chattr +a` set."""


class MountedError(OSError):
    """Something is mounted where a tree is to be removed. Nothing was removed through that mount."""


def refuse_mounts(path: str) -> None:
    """Raise MountedError if anything is mounted at a path or below it. Raises OSError if that is unknown."""
    place, mounts = os.fsencode(_real(path)), []
    with open(MOUNTS, "rb") as table:
        for line in table:
            # The mount point is the fifth field; type and source follow a hyphen (proc_pid_mountinfo(5)).
            before, _, after = line.rstrip(b"\n").partition(b" - ")
            point, (kind, source, *_) = _unescaped(before.split(b" ")[4]), after.split(b" ")
            if point == place or point.startswith(place + b"/"):
                mounts.append((os.fsdecode(point), os.fsdecode(kind + b" " + _unescaped(source))))
    if mounts:
        shown = ", ".join(f"{what} on {point}" for point, what in mounts[:3])
        more = f" and {len(mounts) - 3} more" if len(mounts) > 3 else ""
        commands = " && ".join(f"umount {_quoted(point)}" for point, _ in reversed(mounts[:3]))
        why = f"not removed, because something is mounted there: {shown}{more}; unmount it: `{commands}`"
        raise MountedError(errno.EBUSY, why, path)


def remove(path: str) -> None:
    """Remove a directory with its content, or a file. Follows no link. A missing path is no error.

    Raises MountedError, OSError; then some of the content may be gone.
    """
    refuse_mounts(path)
    directory, name = os.path.split(_real(path))
    try:
        parent = os.open(directory, DIRECTORY)
    except FileNotFoundError:
        return
    try:
        _Walk(parent, directory).remove(name)
    finally:
        os.close(parent)


def allow_removal(path: str) -> None:
    """Clear the flags with which a directory itself can be neither renamed nor removed. Raises OSError."""
    opened = os.open(path, DIRECTORY)
    try:
        _clear_flags(opened)
    finally:
        os.close(opened)


class _Walk:
    """Removes a tree without recursion, because root in a machine can make any number of levels."""

    def __init__(self, directory: int, path: str) -> None:
        self._here, self._path, self._mount = os.dup(directory), path, _mount_id(directory)
        self._above: list[tuple[str, tuple[int, int], list[str]]] = []
        """For each level: the directory's name in its parent, its parent, and names that the parent still has."""

    def remove(self, name: str) -> None:
        names = [name]
        try:
            while True:
                if not names:
                    with os.scandir(self._here) as entries:
                        names = [entry.name for entry, _ in zip(entries, range(NAMES), strict=False)]
                if not names:
                    names = self._leave()
                else:
                    child = names.pop()
                    try:
                        self._delete(os.unlink, child)
                    except FileNotFoundError:
                        pass
                    except IsADirectoryError:
                        self._enter(child, names)
                        names = []
                if not self._above:
                    # Back in the directory that stays.
                    return
        except MountedError:
            raise
        except OSError as error:
            place = self._at(error.filename if isinstance(error.filename, str) else "")
            raise OSError(error.errno, error.strerror, place) from None
        finally:
            os.close(self._here)

    def _enter(self, name: str, names: list[str]) -> None:
        child = os.open(name, DIRECTORY, dir_fd=self._here)
        if _mount_id(child) != self._mount:
            os.close(child)
            raise self._mounted(name)
        self._above.append((name, _identity(self._here), names if len(self._above) < LEVELS else []))
        os.close(self._here)
        self._here = child

    def _leave(self) -> list[str]:
        """Go to the parent, and remove the directory, which is empty. Return the names that the parent still has."""
        parent = os.open("..", DIRECTORY, dir_fd=self._here)
        name, identity, names = self._above[-1]
        if _identity(parent) != identity or _mount_id(parent) != self._mount:
            os.close(parent)
            raise OSError(errno.EBUSY, "moved while it was removed")
        os.close(self._here)
        self._here = parent
        self._above.pop()
        self._delete(os.rmdir, name)
        return names

    def _delete(self, delete: Callable[..., None], name: str) -> None:
        try:
            delete(name, dir_fd=self._here)
            return
        except OSError as error:
            if error.errno == errno.EBUSY:
                # The kernel deletes no mount point.
                raise self._mounted(name) from None
            if error.errno != errno.EPERM:
                raise
        # Clear what forbids to delete the name, and delete it. Other names of the file keep its flags.
        if self._above:
            _clear_flags(self._here)
        probe = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._here)
        try:
            # Only these may be opened, and only these can have such flags.
            kind = os.fstat(probe).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) or _mount_id(probe) != self._mount:
                delete(name, dir_fd=self._here)
                return
            file = os.open(f"/proc/self/fd/{probe}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            os.close(probe)
        try:
            flags = _clear_flags(file)
            delete(name, dir_fd=self._here)
            if flags and stat.S_ISREG(kind) and os.fstat(file).st_nlink:
                _set_flags(file, flags)
        finally:
            os.close(file)

    def _mounted(self, name: str) -> MountedError:
        path = self._at(name)
        advice = f"unmount it: `umount {_quoted(path)}`"
        return MountedError(errno.EBUSY, f"mounted while its directory was removed; it was not touched; {advice}", path)

    def _at(self, name: str) -> str:
        return "/".join((self._path.rstrip("/"), *(each for each, *_ in self._above), name)).rstrip("/")


def _real(path: str) -> str:
    directory, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(directory), name)


def _unescaped(text: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), text)


def _mount_id(opened: int) -> str:
    """Return the number of the mount in which a file was opened. It stays, whatever is mounted later."""
    with open(f"/proc/self/fdinfo/{opened}") as lines:
        return next(line for line in lines if line.startswith("mnt_id:"))


def _identity(opened: int) -> tuple[int, int]:
    status = os.fstat(opened)
    return status.st_dev, status.st_ino


def _clear_flags(opened: int) -> int:
    """Clear the flags with which a file cannot be removed. Return all flags if there were any of these, or 0."""
    flags = bytearray(8)
    try:
        fcntl.ioctl(opened, GET_FLAGS, flags)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
            # This file system has no flags.
            return 0
        raise
    found = int.from_bytes(flags[:4], sys.byteorder)
    if not found & UNREMOVABLE:
        return 0
    _set_flags(opened, found & ~UNREMOVABLE)
    return found


def _set_flags(opened: int, flags: int) -> None:
    fcntl.ioctl(opened, SET_FLAGS, flags.to_bytes(8, sys.byteorder))


def _quoted(path: str) -> str:
    """Return a path as a word for the shell.

    Not shlex.quote: a purge may find only Debian's python3-minimal, which has no shlex.
    """
    return path if re.fullmatch(r"[\w@%+=:,./-]+", path) else "'" + path.replace("'", "'\\''") + "'"


def main(arguments: list[str]) -> int:
    """Remove the paths, or with `--check` first, only say whether anything is mounted there. Return the exit code."""
    check = arguments[:1] == ["--check"]
    status = 0
    for path in arguments[check:]:
        try:
            (refuse_mounts if check else remove)(path)
        except OSError as error:
            sys.stderr.write(f"{error.filename or path}: {error.strerror}\n")
            status = max(status, MOUNTED if isinstance(error, MountedError) else FAILED)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
