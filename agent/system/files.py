"""All access to files, processes and the system bus.

Every path is below a root prefix, so that tests can observe recorded hosts. A failed observation raises OSError: it is
never taken for "no" or "absent".
"""

import contextlib
import copy
import ctypes
import errno
import hashlib
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO, Self

from agent.model.device import DeviceNumber, FileIdentity
from agent.model.errors import BusError
from agent.model.paths import RUNTIME, STATE
from agent.system import removal
from agent.system.opening import (
    content,
    is_locked,
    kept_locked,
    lock_file,
    new_file,
    new_pipe,
    open_directory,
    open_probe,
    plain,
    regular,
    sync_directory,
    write_existing,
)
from agent.system.process import ENVIRONMENT, Bus, Runner, run_checked

if TYPE_CHECKING:
    # Not imported at run time, because the machine half copies nothing.
    from agent.system.copy import Copies

LINK_OF_PROCESS = re.compile(r"/proc/[0-9]+/")
"""Matches the start of the path of a link below the directory of a process, such as /proc/1/root (proc(5))."""
LINK_LIMIT = 40
"""Symbolic links that are followed in one path, like the kernel's MAXSYMLINKS."""
PART_LIMIT = 256
"""Components of one path, with those of the links in it. The kernel has no limit, but needs no call for each."""
OWN_DIRECTORIES = (f"{STATE}/", f"{RUNTIME}/")
"""Prefixes of paths at which only the agent's files belong."""
READ_LIMIT = 1 << 20
"""Bytes of the largest file that is read, unless the caller gives a limit."""
NEW = ".unbounded-agent-new"
"""Suffix of a temporary file's name. Content is first written to this file, which then replaces the real file."""
UCRED_SIZE = 12
"""Bytes of struct ucred: three 32-bit numbers (linux/socket.h)."""
BUS_LIMIT = 10.0
"""Seconds for an answer on the system bus: PID 1 does not answer while it reloads its units."""

# Groups of errno values (errno(3)).

NONEXISTENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Of stat(2), for a path where nothing exists or can exist."""
NOT_FOUND = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO})
"""ENODEV: a sysfs or procfs file whose device disappeared between open(2) and read(2)."""
UNUSABLE = frozenset({errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG})
"""The file exists, but has the wrong type or size; or its path is too long, or has too many links."""
NOT_LISTENING = (errno.ECONNREFUSED, errno.EAGAIN, errno.EPROTOTYPE)
"""Of connect(2): no process listens, or the file is not a socket (ECONNREFUSED); the listener's queue is full (EAGAIN);
or the socket has another type (EPROTOTYPE)."""

# Of statx(2).

AT_FDCWD = -100
AT_NO_AUTOMOUNT = 0x800
AT_STATX_DONT_SYNC = 0x4000
"""Allows cached values: a file's type and device number never change (include/uapi/linux/fcntl.h)."""
AT_SYMLINK_NOFOLLOW = 0x100
STATX_TYPE = 1
STATX_BIRTH = 0x800


class _Statx(ctypes.Structure):
    """struct statx of include/uapi/linux/stat.h, 256 bytes, which is the same on all architectures."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("before_mode", ctypes.c_ubyte * 24),
        ("mode", ctypes.c_uint16),
        ("between", ctypes.c_ubyte * 50),
        ("birth_seconds", ctypes.c_int64),
        ("birth_nanoseconds", ctypes.c_uint32),
        ("times", ctypes.c_ubyte * 36),
        ("rdev_major", ctypes.c_uint32),
        ("rdev_minor", ctypes.c_uint32),
        ("after", ctypes.c_ubyte * 120),
    )


_library = ctypes.CDLL(None, use_errno=True)
_call = _library.statx
_call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Statx))
RENAME_EXCHANGE = 2
"""Of renameat2(2): both paths exist, and swap what they name in one step."""


def _statx(place: str, flags: int, wanted: int) -> _Statx:
    status = _Statx()
    if _call(AT_FDCWD, os.fsencode(place), flags, wanted, ctypes.byref(status)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), place)
    return status


def _link_text(place: str) -> str | None:
    try:
        return os.readlink(place)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
            return None
        raise


class System:
    """Files below `root`, programs through `runner`, services through `bus`. Raises OSError as the system calls do.

    Paths are absolute. They are relative to `root`, and so are absolute links.
    """

    def __init__(
        self, runner: Runner, root: str = "/", bus: Bus | None = None, tool_runner: Runner | None = None
    ) -> None:
        self.root = root.rstrip("/") or "/"
        self._runner, self._bus, self._tool_runner = runner, bus, tool_runner or runner

    def below(self, directory: str) -> Self:
        """Return a copy of this object with `directory` as its root. No link leads out of that root. Raises OSError."""
        root = self._below_root(self._resolve(directory))
        os.lstat(root)
        inner = copy.copy(self)
        inner.root = root.rstrip("/") or "/"
        return inner

    def image(self, directory: str) -> Self:
        """Return a copy whose root is the root file system of an image that is not trusted.

        As for any root, no link leads out of it. While files are written there, no other process may change it. Raises
        OSError, also if `directory` itself is a link.
        """
        if self.read_link(directory) is not None:
            raise NotADirectoryError(errno.ENOTDIR, "a symbolic link", directory)
        return self.below(directory)

    def _below_root(self, path: str) -> str:
        return path if self.root == "/" else self.root + path

    def _at(self, path: str, *, follow: bool = True) -> str:
        """Return the path with the root prefix, and with links resolved below the root.

        Without `follow`, a link in the last component stays. If the root is /, the path is returned unchanged.
        """
        if self.root == "/":
            return path
        if follow:
            return self._below_root(self._resolve(path))
        return self._below_root(os.path.join(self._resolve(os.path.dirname(path)), os.path.basename(path)))

    def _resolve(self, path: str, *, of_processes: bool = True) -> str:
        """Return the path with links resolved; absolute links lead to a path below the root. The path need not exist.

        Without `of_processes`, raises OSError (EXDEV) for links such as /proc/PID/root.
        """
        # This is the innermost loop of each pass, so readlink is its only system call for a component.
        prefix = "" if self.root == "/" else self.root
        done, links, remaining = "", 0, [part for part in reversed(path.split("/")) if part]
        parts = len(remaining)
        while remaining:
            if links > LINK_LIMIT or parts > PART_LIMIT:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            part = remaining.pop()
            if part in (".", ".."):
                done = done.rpartition("/")[0] if part == ".." else done
                continue
            here = f"{done}/{part}"
            try:
                target = os.readlink(prefix + here)
            except OSError as error:
                # Otherwise each further component would be added to a path that has become long.
                if error.errno == errno.ENAMETOOLONG:
                    raise
                done = here
                continue
            if not of_processes and LINK_OF_PROCESS.match(here):
                raise OSError(errno.EXDEV, "leads through /proc to files of another process", path)
            inserted = [each for each in reversed(target.split("/")) if each]
            links, parts, remaining = links + 1, parts + len(inserted), remaining + inserted
            done = "" if target.startswith("/") else done
        return done or "/"

    # ---- programs and services

    def run(self, *argv: str, timeout: float = 30.0) -> str:
        """Run a program and return its standard output. Raises CommandError if it fails."""
        return run_checked(self._runner, argv, timeout)

    def run_tool(self, *argv: str, timeout: float) -> str:
        """Run a program that may use proxies and write files of any size, and is killed if this process dies."""
        return run_checked(self._tool_runner, argv, timeout)

    def find_program(self, name: str) -> str | None:
        """Return the path of the program that `run` would start by that name; None if there is none."""
        places = (f"{directory}/{name}" for directory in ENVIRONMENT["PATH"].split(":"))
        return next((path for path in places if self.exists(path) and os.access(self._at(path), os.X_OK)), None)

    def call(
        self, service: str, path: str, method: str, *arguments: object, signature: str = "", timeout: float = BUS_LIMIT
    ) -> tuple[object, ...]:
        """Call a method on the system bus and return its result. Raises BusError.

        Without a signature, all arguments are strings.
        """
        if self._bus is None:
            raise BusError(f"{method} of {service}: no connection to the system bus")
        return self._bus(service, path, method, signature or "s" * len(arguments), arguments, timeout)

    # ---- what exists

    def _status(self, path: str, *, follow: bool = True) -> os.stat_result | None:
        try:
            return os.stat(self._at(path, follow=follow), follow_symlinks=follow)
        except ValueError:
            # A path from a configuration or a document may contain a null character, which no file name has.
            return None
        except OSError as error:
            if error.errno in NONEXISTENT:
                return None
            raise

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

    def is_program(self, path: str) -> bool:
        """Return whether the path is an executable file, or a link to one."""
        found = self._status(path)
        return found is not None and stat.S_ISREG(found.st_mode) and bool(found.st_mode & 0o111)

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
        """Return what `read_link` returns for each entry of a directory, by name, with no system call but for links."""
        with os.scandir(self._at(path)) as entries:
            return {entry.name: _link_text(entry.path) if entry.is_symlink() else None for entry in entries}

    def real_path(self, path: str) -> str:
        """Return the path with its links resolved below the root. Raises OSError if it does not exist.

        Raises OSError (EXDEV) if a link such as /proc/PID/root is on the path: it leads to what that process sees.
        """
        resolved = self._resolve(path, of_processes=False)
        os.lstat(self._below_root(resolved))
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

        os.stat does not tell it. Links are not followed. A rename does not change that time. Raises OSError.
        """
        status = _statx(self._at(path, follow=False), AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_BIRTH)
        known = bool(status.mask & STATX_BIRTH)
        return status.birth_seconds * 10**9 + status.birth_nanoseconds if known else 0

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
            os.getxattr(self._at(path, follow=False), "system.posix_acl_access", follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
                return False
            raise
        return True

    def identity(self, path: str, *, follow: bool = True) -> FileIdentity:
        """Return a file's identity. For a link: that of the file it leads to; without `follow`, that of the link."""
        status = os.stat(self._at(path, follow=follow), follow_symlinks=follow)
        return FileIdentity(
            status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, bool(status.st_mode & 0o111)
        )

    def mode(self, path: str) -> int:
        """Return a file's permission bits. Links are followed."""
        return stat.S_IMODE(os.stat(self._at(path)).st_mode)

    def device(self, path: str) -> DeviceNumber | None:
        """Return a character device's numbers, mode and owners; None for any other file or an unlinked node.

        Follows no links.
        """
        status = os.lstat(self._at(path, follow=False))
        # A node without hard links was bound into a machine, and has since been removed on the host, for example by a
        # reload of nvidia-drm. It still opens, but the kernel refuses to bind it into a container (ENOENT).
        if not stat.S_ISCHR(status.st_mode) or not status.st_nlink:
            return None
        number, mode = status.st_rdev, stat.S_IMODE(status.st_mode)
        return DeviceNumber(os.major(number), os.minor(number), mode, status.st_uid, status.st_gid)

    def device_behind(self, link: str) -> tuple[int, int] | None:
        """Return a character device's major and minor; None for any other file. Links are followed.

        A link in /proc/PID/fd leads to the open file itself, wherever it is and whether or not it has a path. os.stat
        would ask the NFS server or FUSE daemon that provides that file. If it is dead, os.stat never returns, and any
        process may have such a file open. statx(2) can return the numbers without asking.
        """
        status = _statx(self._at(link), AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT, STATX_TYPE)
        return (status.rdev_major, status.rdev_minor) if stat.S_ISCHR(status.mode) else None

    def listening_process(self, path: str) -> int | None:
        """Return the id of the process that listens on a Unix socket; None if none answers, or it is no stream socket.

        The id is 0 for a process outside this PID namespace. This connects and disconnects at once, sends nothing, and
        follows no link.
        """
        try:
            probe = open_probe(self._at(path, follow=False), follow=False)
        except FileNotFoundError:
            return None
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                # With this, connect(2) returns EAGAIN instead of blocking if the listener no longer accepts.
                client.setblocking(False)
                # By descriptor: a path may be too long for sun_path (107 bytes), or lead to another file by now.
                client.connect(f"/proc/self/fd/{probe}")
                # unix(7): these are the credentials with which the listener called listen(2).
                credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_SIZE)
        except OSError as error:
            if error.errno in NOT_LISTENING:
                return None
            raise
        finally:
            os.close(probe)
        return int.from_bytes(credentials[:4], sys.byteorder)

    def architecture(self) -> str:
        """Return the kernel's machine name, uname(2): x86_64, aarch64."""
        return os.uname().machine

    def free_bytes(self, path: str) -> int:
        """Return the free bytes of the file system that a directory is on, without those that are reserved for root."""
        status = os.statvfs(self._at(path))
        return status.f_bavail * status.f_frsize

    def free_share(self, path: str) -> float:
        """Return which part of the file system that a directory is on is free."""
        status = os.statvfs(self._at(path))
        return status.f_bavail / max(status.f_blocks, 1)

    def free_files(self, path: str) -> int:
        """Return how many files can still be made on the file system that a directory is on."""
        status = os.statvfs(self._at(path))
        # Some file systems have no limit, and say 0 of 0.
        return status.f_favail if status.f_files else sys.maxsize

    def full_path(self, path: str) -> str:
        """Return the path with the root prefix, for system calls that take paths (inotify_add_watch(2))."""
        return self._at(path)

    # ---- reading

    def read(self, path: str, limit: int = READ_LIMIT) -> bytes:
        """Return the content of a regular file, also in /proc or /sys. Never opens a FIFO or device."""
        return content(open_probe(self._at(path)), path, limit)[0]

    def head(self, path: str, size: int) -> bytes:
        """Return the first bytes of a regular file of any size."""
        return content(open_probe(self._at(path)), path, size, whole=False)[0]

    def digest(self, path: str) -> str:
        """Return the SHA-256 digest of a regular file of any size, in hexadecimal."""
        with plain(self._at(path)) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def read_untrusted(self, path: str, limit: int = READ_LIMIT) -> tuple[bytes, float]:
        """Return content and change time of a file that other users may replace. Raises OSError (ELOOP) for a link."""
        return content(open_probe(self._at(path, follow=False), follow=False), path, limit)

    def is_locked(self, path: str) -> bool:
        """Return whether somebody keeps a regular file locked (flock(2)), as `stream` does. Never waits."""
        return is_locked(self._at(path))

    def read_text(self, path: str) -> str:
        """Return the content of a regular file as text. Bytes that are not UTF-8 become surrogates."""
        return self.read(path).decode(errors="surrogateescape")

    def lines(self, path: str) -> Iterator[bytes]:
        """Yield the lines of a file in /proc, of any size, without the newline. Only a newline ends a line."""
        with plain(self._at(path)) as file:
            for line in file:
                yield line.removesuffix(b"\n")

    def entries(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a directory."""
        return tuple(sorted(os.listdir(self._at(path))))

    def some_entries(self, path: str, limit: int) -> tuple[str, ...]:
        """Return the names in a directory into which pods may put any number: no more than `limit`, sorted."""
        with os.scandir(self._at(path)) as found:
            return tuple(sorted(each.name for _, each in zip(range(limit), found, strict=False)))

    def listing(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the names in a directory of any size, each with what lstat(2) says. Refuses a link."""
        descriptor = open_directory(self._at(path, follow=False))
        try:
            with os.scandir(descriptor) as found:
                for each in found:
                    # It may be gone by now.
                    with contextlib.suppress(FileNotFoundError):
                        yield each.name, each.stat(follow_symlinks=False)
        finally:
            os.close(descriptor)

    def open_public(self, real_path: str) -> BinaryIO:
        """Open a world-readable regular file whose path contains no link. Raises OSError (EINVAL, ELOOP) for others.

        It may be where users other than root can write: a link there might lead to a secret of root. Checking the path
        before or after the open is not enough, because the check may see a different file. So this checks the file
        behind the descriptor.
        """
        place = self._below_root(real_path)
        probe = open_probe(place, follow=False)
        try:
            mode = os.fstat(probe).st_mode
            # proc(5): the link in /proc has the real path of the file. That path differs from `place` if `place` has
            # links, or if the file was moved or removed.
            if stat.S_ISLNK(mode) or os.readlink(f"/proc/self/fd/{probe}") != place:
                raise OSError(errno.ELOOP, "a link is in its path, or it was moved or removed", place)
            if stat.S_ISREG(mode) and not mode & stat.S_IROTH:
                raise OSError(errno.EINVAL, f"not every user can read it (mode {stat.S_IMODE(mode):04o})", place)
            return regular(probe, place)
        finally:
            os.close(probe)

    # ---- writing

    def make_directory(self, path: str) -> None:
        """Make a directory and its missing parents durably, each with mode 0755 whatever the umask."""
        place, missing = self._at(path), []
        while not os.path.isdir(place):
            missing.append(place)
            place = os.path.dirname(place)
        for directory in reversed(missing):
            # Another thread, or another service of the agent, may make it meanwhile.
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
                os.chmod(directory, 0o755)
                sync_directory(os.path.dirname(directory))

    def make_private(self, path: str) -> None:
        """Make a directory, or change it, so that only root may enter it.

        For root file systems, which have device nodes and perhaps vulnerable setuid programs.
        """
        self.make_directory(path)
        if self.mode(path) & 0o077:
            os.chmod(self._at(path), 0o700)

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Replace a file atomically and durably: no reader ever sees a part of the content."""
        self.stream(path, (content,), mode)

    def stream(
        self,
        path: str,
        chunks: Iterable[bytes],
        mode: int = 0o644,
        *,
        durable: bool = True,
        until: contextlib.ExitStack | None = None,
    ) -> None:
        """Replace a file as `write` does. If `chunks` raises an error, the old file stays.

        If this is not `durable`, a crash of the kernel before `sync` may leave the old file or a damaged one. The new
        file is locked before anybody sees it, `until` that ends.
        """
        with self._replacing(path) as temporary, new_file(temporary) as file:
            if until is not None:
                until.callback(os.close, kept_locked(file))
            file.writelines(chunks)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if durable:
                os.fsync(file.fileno())
        if durable:
            self.sync_directory(os.path.dirname(path))

    def sync(self, path: str) -> None:
        """Make durable what `stream` wrote."""
        with plain(self._at(path)) as file:
            os.fsync(file.fileno())
        self.sync_directory(os.path.dirname(path))

    def write_kernel(self, path: str, value: str) -> None:
        """Write to an existing file of the kernel, such as one in /proc/sys."""
        write_existing(self._at(path), value.encode())

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link atomically. The link replaces anything but a directory."""
        with self._replacing(path) as temporary:
            os.symlink(target, temporary)

    def make_pipe(self, *paths: str) -> None:
        """Make one FIFO, which only root may open, with several paths in one file system. Nothing may be there yet."""
        first, *others = (self._at(path, follow=False) for path in paths)
        new_pipe(first)
        for place in others:
            os.link(first, place, follow_symlinks=False)

    @contextlib.contextmanager
    def _replacing(self, path: str) -> Iterator[str]:
        """Yield the path of a temporary file, which replaces the file at `path` when the block ends.

        After an error, the temporary file is removed instead. Its name is always the same, so that leftovers of killed
        writers do not pile up: the next writer removes them. The name begins with a dot, so that programs that read
        whole directories skip the file. If somebody made a directory with that name, the directory is put aside; one
        with the file's own name only where nothing but the agent's files belongs.
        """
        self.make_directory(os.path.dirname(path))
        try:
            self.remove_temporary(path)
        except IsADirectoryError:
            self.put_aside(temporary_path(path))
        place = self._at(path, follow=False)
        temporary = temporary_path(place)
        try:
            yield temporary
            if path.startswith(OWN_DIRECTORIES) and os.path.isdir(place) and not os.path.islink(place):
                self.put_aside(path)
            os.rename(temporary, place)
        except BaseException as error:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            if isinstance(error, OSError) and error.errno is not None:
                # The kernel's error for a full disk names no file.
                raise OSError(error.errno, error.strerror, path) from error
            raise

    def remove_temporary(self, path: str) -> None:
        """Remove the temporary file that a killed `write` or `link` left."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(temporary_path(self._at(path, follow=False)))

    def copy(self, reading: BinaryIO, target: str, mode: int, copies: "Copies") -> None:
        """Copy the data of an open file to a new one, as one of `copies`. The caller syncs the directory."""
        copies.add(reading, new_file(self._at(target, follow=False)), mode)

    def open_lock(self, path: str) -> int:
        """Return a descriptor of a lock file, which no other user may open. It is made if it is missing."""
        return lock_file(self._at(path, follow=False))

    def remove(self, path: str) -> None:
        """Remove a file or link, if it exists, and sync the directory."""
        place = self._at(path, follow=False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)
            sync_directory(os.path.dirname(place))

    def remove_tree(self, path: str) -> None:
        """Remove a directory of the agent with its content, or a file or link in its place. Follows no links.

        Raises OSError, for example if anything is mounted there (agent.system.removal).
        """
        if self.is_directory(path, follow=False):
            removal.remove(self._at(path, follow=False))
        else:
            self.remove(path)

    def remove_empty_directory(self, path: str) -> None:
        """Remove a directory durably, if there is one and nothing is in it."""
        if self.is_directory(path) and not self.entries(path):
            os.rmdir(self._at(path, follow=False))
            self.sync_directory(os.path.dirname(path))

    def rename(self, old: str, new: str) -> None:
        """Rename within one file system, durably."""
        os.rename(self._at(old, follow=False), self._at(new, follow=False))
        self.sync_directory(os.path.dirname(new))

    def exchange(self, one: str, other: str) -> None:
        """Swap what two paths in one directory name, durably: at no moment is one of them missing. Raises OSError."""
        places = [os.fsencode(self._at(path, follow=False)) for path in (one, other)]
        if _library.renameat2(AT_FDCWD, places[0], AT_FDCWD, places[1], RENAME_EXCHANGE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), one)
        self.sync_directory(os.path.dirname(one))

    def put_aside(self, path: str) -> str:
        """Rename whatever is in the place of one of the agent's files, and return its new path."""
        aside = f"{path}.damaged-{time.time_ns()}"
        self.rename(path, aside)
        return aside

    def sync_directory(self, path: str) -> None:
        """Make renames in a directory durable."""
        sync_directory(self._at(path))


def temporary_path(path: str) -> str:
    """Return the path of the temporary file that `write` and `link` use. If they are killed, it stays."""
    directory, name = os.path.split(path)
    return f"{directory}/.{name}{NEW}"


MOUNTS = "/proc/self/mountinfo"
"""The list of mounts (proc_pid_mountinfo(5))."""


def mount_points(system: System) -> frozenset[str]:
    """Return the mount points below / that have other files than the directory below them. Raises OSError.

    A service's sandbox binds directories such as /root onto themselves (ProtectSystem=strict).
    """
    mounts = dict[str, tuple[str, str]]()
    for line in system.lines(MOUNTS):
        _, _, device, root, point, *_ = map(_unescaped, line.split(b" "))
        mounts[point] = device, root
    device, root = mounts["/"]
    return frozenset(each for each, found in mounts.items() if found != (device, root.rstrip("/") + each)) - {"/"}


def _unescaped(text: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), text))


def mounted(system: System, file_system: str) -> frozenset[str]:
    """Return the mount points of file systems of the type `file_system`, with the kernel's escapes. Raises OSError."""
    found = set()
    for line in system.lines(MOUNTS):
        # The mount point is followed by optional fields, a hyphen, and the type.
        before, _, after = line.decode(errors="surrogateescape").partition(" - ")
        fields = before.split(" ")
        if after.split(" ")[0] == file_system and len(fields) > 4:
            found.add(fields[4])
    return frozenset(found)
