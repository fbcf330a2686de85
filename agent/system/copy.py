"""Copies files, and makes the copies durable together."""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterable
from typing import BinaryIO, Self

from agent.model.errors import ApplyError, ExitCodeError
from agent.system import files, removal
from agent.system.files import NEW, System

FICLONE = 0x40049409
"""From linux/fs.h: makes a file share the extents of another one, ioctl_ficlone(2)."""
STEP = 64 << 20
"""Bytes between two calls of `progress`."""
CHUNK = 1 << 20
"""Bytes that are read and written at a time if the kernel cannot copy."""
KERNEL_CANNOT_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM})
"""Errors of copy_file_range(2) that mean that the kernel cannot copy this file: the file system does not support the
call; the two files are on different file systems (Linux 5.19 and later may refuse that); or a system-call filter
forbids the call (EPERM)."""

OPEN_LIMIT = 256
"""Copies that are open at the same time. systemd lets a service open 1024 files, unless it asks for more."""
UNSYNCED_LIMIT = 256 << 20
"""Bytes after which the copies are synced. One fsync(2) may wait until the data of all copies is written. That wait
must stay short, because `progress` is not called meanwhile."""


class Copies:
    """Copies that are durable at the end of a `with` block.

    The disk writes the copies, in any order, while further copies are made. Each copy stays open until it is durable:
    fsync(2) reports a failed write only to descriptors that were open when the write failed. `progress` is called after
    each part of a large copy, and each time that the disk has written a copy.
    """

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress
        self._open: list[BinaryIO] = []
        self._unsynced = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._sync()
        finally:
            for copy in self._open:
                copy.close()

    def add(self, reading: BinaryIO, writing: BinaryIO, mode: int) -> None:
        """Copy the content of an open file into the new file `writing`, and set its mode. Raises OSError.

        This object closes `writing`.
        """
        self._open.append(writing)
        copy_content(reading.fileno(), writing.fileno(), self._progress)
        os.fchmod(writing.fileno(), mode)
        # This makes the kernel begin to write the file's data (mm/fadvise.c). Some file systems ignore or refuse it.
        with contextlib.suppress(OSError):
            os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced += os.fstat(writing.fileno()).st_size
        if len(self._open) == OPEN_LIMIT or self._unsynced > UNSYNCED_LIMIT:
            self._sync()

    def _sync(self) -> None:
        for copy in self._open:
            os.fsync(copy.fileno())
            copy.close()
            self._progress()
        self._open.clear()
        self._unsynced = 0


def copy_content(reading: int, writing: int, progress: Callable[[], None]) -> None:
    """Reflink the content if the file system can; otherwise copy it in parts, and call `progress` between them.

    Copying in parts stops at the size that the file had at the start. A file that grows meanwhile goes unnoticed here:
    the caller checks for that.
    """
    try:
        fcntl.ioctl(writing, FICLONE, reading)
    except OSError:
        # EOPNOTSUPP, EXDEV, EINVAL: no reflink is possible between these files.
        remaining = os.fstat(reading).st_size
        while remaining > 0 and (copied := _copy_step(reading, writing, min(remaining, STEP))):
            remaining -= copied
            if remaining:
                # Without this, the page cache would take all data, and a disk that hangs would go unnoticed.
                os.fdatasync(writing)
                progress()


def _copy_step(reading: int, writing: int, size: int) -> int:
    """Copy up to `size` bytes, and return how many were copied: 0 only at the end of the file."""
    try:
        # Some file systems copy nothing and report success (copy_file_range(2), BUGS). So 0 does not prove that this is
        # the end of the file: `os.read` below tells.
        if copied := os.copy_file_range(reading, writing, size):
            return copied
    except OSError as error:
        if error.errno not in KERNEL_CANNOT_COPY:
            raise
    copied = 0
    while copied < size and (content := memoryview(os.read(reading, min(size - copied, CHUNK)))):
        copied += len(content)
        while content:
            content = content[os.write(writing, content) :]
    return copied


# Writes files into the root file system of an image that is not trusted.
#
# The kernel resolves every path as if that root were `/` (openat2(2), RESOLVE_IN_ROOT): whatever links the image has,
# no path leads out of it. A link, FIFO or device at the path of a file to write is replaced, not opened.


SYS_OPENAT2 = 437
"""The number is the same on all architectures that the agent supports."""
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10
ATTEMPTS = 100
"""How often to try to open a path. If the path, or a link on it, has a component `..`, openat2 fails with EAGAIN while
anything on the host is renamed or mounted."""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _OpenHow(ctypes.Structure):
    """struct open_how of include/uapi/linux/openat2.h."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_OpenHow), ctypes.c_size_t)
_syscall.restype = ctypes.c_long


class RootWriter:
    """Writes below the directory `root`, which must not be a link. Paths are those that a program in the root uses.

    Every method may raise OSError. If the error concerns a file in the root, it names the path as seen from the root.
    Methods that write raise ValueError for a path that does not end in a name. While this object is used, no other
    process may change the root.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Replace a file atomically and durably. Missing parent directories are made with mode 0755."""
        self.stream(path, (content,), mode)

    def stream(self, path: str, chunks: Iterable[bytes], mode: int) -> None:
        """Replace a file as `write` does, in chunks of content. If the iterable raises an error, the old file stays."""

        def fill(writing: int) -> None:
            for chunk in chunks:
                _write_all(writing, chunk)

        self._replace(path, mode, fill)

    def copy(self, source: str, path: str, mode: int) -> None:
        """Replace a file with a copy of the host's file `source`.

        The caller ensures that only root can write `source`.
        """
        with files.plain(source) as reading:
            self._replace(path, mode, lambda writing: copy_content(reading.fileno(), writing, lambda: None))

    def read(self, path: str, limit: int) -> bytes | None:
        """Return the content of a regular file; None if nothing is there. Raises OSError (EFBIG) above `limit`."""
        try:
            probe = self._open(path, os.O_PATH)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return files.content(probe, path, limit)[0]

    def is_program(self, path: str) -> bool:
        """Return whether the path is an executable file. Links in the root are followed."""
        try:
            probe = self._open(path, os.O_PATH)
        except (FileNotFoundError, NotADirectoryError):
            return False
        with _Closing(probe):
            mode = os.fstat(probe).st_mode
        return stat.S_ISREG(mode) and bool(mode & 0o111)

    def _replace(self, path: str, mode: int, fill: Callable[[int], None]) -> None:
        name = _name(path)
        temporary = f".{name}{NEW}"
        with _Closing(self._open_parent(path)) as parent:
            try:
                _unlink(temporary, parent)
                try:
                    with _Closing(_new_file(temporary, parent)) as writing:
                        fill(writing)
                        os.fchmod(writing, mode)
                        os.fsync(writing)
                    os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
                except BaseException:
                    _unlink(temporary, parent)
                    raise
                os.fsync(parent)
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from error

    def _open_parent(self, path: str) -> int:
        """Return a descriptor of a file's directory. Create the directory and its parents if they are missing."""
        parts = [part for part in os.path.dirname(path).split("/") if part]
        descriptor = self._open("/", os.O_RDONLY | os.O_DIRECTORY)
        for count, part in enumerate(parts, 1):
            with _Closing(descriptor):
                here = "/" + "/".join(parts[:count])
                try:
                    descriptor = self._open(here, os.O_RDONLY | os.O_DIRECTORY)
                except FileNotFoundError:
                    descriptor = _new_directory(part, descriptor, here)
        return descriptor

    def _open(self, path: str, flags: int) -> int:
        """Open a path as a program in the root would.

        `flags` must have O_PATH or O_DIRECTORY. Without these, opening a FIFO could block.
        """
        with _Closing(os.open(self._root, DIRECTORY)) as root:
            return _openat2(root, path, flags)


class _Closing:
    """Closes a descriptor at the end of a `with` statement."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _openat2(root: int, path: str, flags: int) -> int:
    # The path is made relative: if RESOLVE_IN_ROOT were missing by mistake, an absolute one would lead to a file of the
    # host.
    relative = path.lstrip("/") or "."
    how = _OpenHow(flags | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    for _ in range(ATTEMPTS):
        descriptor = _syscall(SYS_OPENAT2, root, os.fsencode(relative), ctypes.byref(how), ctypes.sizeof(how))
        if descriptor >= 0:
            return int(descriptor)
        if (number := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR):
            raise OSError(number, os.strerror(number), path)
    raise OSError(errno.EAGAIN, "cannot be opened while files on the host are renamed or mounted: try again", path)


def _new_file(name: str, parent: int) -> int:
    """Make a file for writing that only its owner may read."""
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)


def _new_directory(name: str, parent: int, path: str) -> int:
    """Durably make a directory that is missing, with mode 0755, and return a descriptor."""
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        raise OSError(errno.ENOTDIR, "a link that leads nowhere is in the place of a directory", path) from None
    os.fsync(parent)
    descriptor = os.open(name, DIRECTORY, dir_fd=parent)
    os.fchmod(descriptor, 0o755)
    return descriptor


def _unlink(name: str, parent: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)


def _write_all(writing: int, content: bytes) -> None:
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(writing, remaining) :]


def _name(path: str) -> str:
    """Return a path's last component. Raises ValueError unless it is a file's name."""
    name = os.path.basename(path)
    if name in ("", ".", ".."):
        raise ValueError(f"{path} is not the path of a file")
    return name


# Removes trees in a process of its own, which can be stopped at its time limit (agent.system.removal).


DOOR = (sys.executable, "-IS", removal.__file__)
"""The program that removes trees. Its arguments are their paths."""
CHECK_LIMIT = 30.0
"""Seconds to read the list of mounts."""


def clear(paths: tuple[str, ...], system: System, limit: float) -> None:
    """Remove trees that a machine may have filled. Raises AgentError, for example if it takes over `limit` seconds."""
    _run(paths, system, limit)


def refuse_mounts(path: str, system: System) -> None:
    """Raise ApplyError if anything is mounted at the path or below it, so that it cannot be removed."""
    _run(("--check", path), system, CHECK_LIMIT)


def _run(arguments: tuple[str, ...], system: System, limit: float) -> None:
    try:
        system.run(*DOOR, *arguments, timeout=limit)
    except ExitCodeError as error:
        # The program's own messages say what to do.
        again = "correct this, then run the same command again" if error.status == removal.MOUNTED else ""
        raise ApplyError(error.stderr.strip().replace("\n", "; "), again) from error
