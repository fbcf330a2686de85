"""Writes files into the root file system of an image that is not trusted.

The kernel resolves every path as if that root were `/` (openat2(2), RESOLVE_IN_ROOT): whatever links the image has, no
path leads out of it. A link, FIFO or device at the path of a file to write is replaced, not opened.
"""

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable

from agent.system import opening
from agent.system.copy import copy_content
from agent.system.files import NEW

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
        with opening.plain(source) as reading:
            self._replace(path, mode, lambda writing: copy_content(reading.fileno(), writing, lambda: None))

    def read(self, path: str, limit: int) -> bytes | None:
        """Return the content of a regular file; None if nothing is there. Raises OSError (EFBIG) above `limit`."""
        try:
            probe = self._open(path, os.O_PATH)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return opening.content(probe, path, limit)[0]

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
