"""The only door to files, processes and the system bus.

Every path is below one root prefix, so that recorded hosts can be observed.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import BinaryIO

from agent.errors import BusError
from agent.identity import DeviceNumber, FileIdentity
from agent.system.commands import ENVIRONMENT, Bus, Runner, run_checked
from agent.system.rooted import Rooted

READ_LIMIT = 1 << 20
"""Bytes; nothing that we read is larger. The kernel refuses reads of /proc/sys by 4 MiB and more (KMALLOC_MAX_SIZE)."""
NEW = ".unbounded-agent-new"
"""Behind the name of a file that is being written anew."""
BUS_LIMIT = 10.0
"""Seconds for an answer on the system bus: PID 1 gives none while it reloads its units."""


class System(Rooted):
    """Files below `root`, programs by `runner`, services by `bus`. Methods raise OSError as the system calls do."""

    def __init__(self, runner: Runner, root: str = "/", bus: Bus | None = None) -> None:
        super().__init__(root)
        self._runner, self._bus = runner, bus

    def run(self, *argv: str, timeout: float = 30.0) -> str:
        """Standard output of a program that succeeded; raises CommandError."""
        return run_checked(self._runner, argv, timeout)

    def call(
        self, service: str, path: str, method: str, *arguments: object, signature: str = "", timeout: float = BUS_LIMIT
    ) -> tuple[object, ...]:
        """What a method on the system bus returns; raises BusError. Without a signature the arguments are text."""
        if self._bus is None:
            raise BusError(f"{method} of {service}: there is no connection to the system bus here")
        return self._bus(service, path, method, signature or "s" * len(arguments), arguments, timeout)

    # ---- reading

    def read(self, path: str, limit: int = READ_LIMIT) -> bytes:
        """A regular file's content (files of /proc and /sys are regular); no FIFO and no device is ever opened."""
        return self._read(os.open(self._at(path), os.O_PATH | os.O_CLOEXEC), path, limit)[0]

    def head(self, path: str, size: int) -> bytes:
        """The first bytes of a regular file of any length."""
        return self._read(os.open(self._at(path), os.O_PATH | os.O_CLOEXEC), path, size, whole=False)[0]

    def read_untrusted(self, path: str, limit: int = READ_LIMIT) -> tuple[bytes, float]:
        """As `read`, of a file that somebody else may replace: a link is refused (ELOOP). Also its change time.

        The change time (seconds since the epoch), because the modification time is the writer's to choose.
        """
        flags = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW
        return self._read(os.open(self._at(path, follow=False), flags), path, limit)

    def _read(self, probe: int, path: str, limit: int, *, whole: bool = True) -> tuple[bytes, float]:
        # O_PATH first: to open a device is to act on it, a watchdog for example.
        try:
            status = os.fstat(probe)
            if stat.S_ISLNK(status.st_mode):
                raise OSError(errno.ELOOP, "a symbolic link", path)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            with open(f"/proc/self/fd/{probe}", "rb") as file:
                content = file.read(limit + 1)
        finally:
            os.close(probe)
        if whole and len(content) > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", path)
        return content[:limit], status.st_ctime

    def read_text(self, path: str) -> str:
        """As `read`; bytes that are not UTF-8 are kept by surrogateescape."""
        return self.read(path).decode(errors="surrogateescape")

    def lines(self, path: str) -> Iterator[bytes]:
        """Of a file of /proc that may be of any size, one by one, without their end: a newline and nothing else."""
        with open(self._at(path), "rb") as file:
            for line in file:
                yield line.removesuffix(b"\n")

    def entries(self, path: str) -> tuple[str, ...]:
        """Sorted names in a directory."""
        return tuple(sorted(os.listdir(self._at(path))))

    def exists(self, path: str) -> bool:
        """Whether there is anything at all; a dangling link counts."""
        return os.path.lexists(self._at(path, follow=False))

    def is_directory(self, path: str) -> bool:
        """Whether it is a directory, links followed within the root."""
        return os.path.isdir(self._at(path))

    def find_program(self, name: str) -> str | None:
        """Where a program is that `run` would start by that name: what cannot be started is passed over, as there."""
        places = (f"{directory}/{name}" for directory in ENVIRONMENT["PATH"].split(":"))
        return next((path for path in places if os.access(self._at(path), os.X_OK)), None)

    def is_mount(self, path: str) -> bool:
        """Whether a file system is mounted there."""
        return os.path.ismount(self._at(path))

    def is_file(self, path: str) -> bool:
        """Whether it is a regular file, links followed within the root; a look that fails is not a No."""
        try:
            return stat.S_ISREG(os.stat(self._at(path)).st_mode)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return False
            raise

    def read_link(self, path: str) -> str | None:
        """A symbolic link's text; None for anything else, also for nothing."""
        try:
            return os.readlink(self._at(path, follow=False))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
                return None
            raise

    def real_path(self, path: str) -> str:
        """The path without symbolic links, absolute links resolved below the root; FileNotFoundError if dangling."""
        resolved = self._resolve(path)
        os.lstat(self._below_root(resolved))
        return resolved

    def identity(self, path: str) -> FileIdentity:
        """Of a file, links followed."""
        status = os.stat(self._at(path))
        return FileIdentity(
            status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, bool(status.st_mode & 0o111)
        )

    def link_inode(self, path: str) -> int | None:
        """Inode number of a symbolic link itself; None when there is none."""
        try:
            return os.lstat(self._at(path, follow=False)).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return None

    def link_count(self, path: str) -> int:
        """How many names a file has, links not followed; 0 for a mounted one that was removed where it comes from."""
        return os.lstat(self._at(path, follow=False)).st_nlink

    def mode(self, path: str) -> int:
        """Permission bits of a file, links followed."""
        return stat.S_IMODE(os.stat(self._at(path)).st_mode)

    def device(self, path: str) -> DeviceNumber | None:
        """Numbers of a character device; None for any other file, and for a removed one. Links are not followed."""
        status = os.lstat(self._at(path, follow=False))
        # No link left: bound into a machine, and removed on the host since (a reload of nvidia-drm makes all DRI nodes
        # anew). It still opens by its number, but the kernel refuses to bind it into a container (ENOENT).
        if not stat.S_ISCHR(status.st_mode) or not status.st_nlink:
            return None
        return DeviceNumber(
            os.major(status.st_rdev),
            os.minor(status.st_rdev),
            stat.S_IMODE(status.st_mode),
            status.st_uid,
            status.st_gid,
        )

    def device_behind(self, link: str) -> tuple[int, int] | None:
        """Major and minor of a character device, links followed; None for any other file.

        From /proc/PID/fd the kernel goes to what is open itself, wherever that is and whether or not it has a path.
        """
        # Here, as few runs need it, and ctypes costs the machine's start.
        from agent.system.statx import character_device

        return character_device(self._at(link))

    def listening_process(self, path: str) -> int | None:
        """Who listens on a Unix socket, see agent.system.sockets."""
        # Here, as few runs need it, and it costs the machine half a twentieth of its start.
        from agent.system.sockets import listening_process

        return listening_process(self._at(path, follow=False))

    def architecture(self) -> str:
        """The kernel's machine name, uname(2): x86_64, aarch64."""
        return os.uname().machine

    def free_bytes(self, path: str) -> int:
        """Space that root may still use on the file system of a directory."""
        found = os.statvfs(self._at(path))
        return found.f_bavail * found.f_frsize

    def place(self, path: str) -> str:
        """Where a path really is, links followed, for system calls that take names (inotify_add_watch(2))."""
        return self._at(path)

    # ---- writing

    def make_directory(self, path: str) -> None:
        """With parents, each mode 0755 whatever the umask."""
        place = self._at(path)
        missing = []
        while not os.path.isdir(place):
            missing.append(place)
            place = os.path.dirname(place)
        for directory in reversed(missing):
            # Another thread, or the other service of a machine, may make it meanwhile.
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
                os.chmod(directory, 0o755)

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Replace a file atomically and durably: never half-written, whatever happens."""
        self.make_directory(os.path.dirname(path))
        place, temporary = self._replacing(path)
        try:
            # Nobody else may read it before its mode is set, whatever the umask.
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(descriptor, mode)
                os.fsync(descriptor)
            os.rename(temporary, place)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        self.sync_directory(os.path.dirname(path))

    def link(self, path: str, target: str) -> None:
        """Put a symbolic link in place atomically; what was there is replaced, a directory is not."""
        self.make_directory(os.path.dirname(path))
        place, temporary = self._replacing(path)
        os.symlink(target, temporary)
        os.rename(temporary, place)

    def remove(self, path: str) -> None:
        """Remove a file or link; nothing there is well."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(path, follow=False))

    def remove_tree(self, path: str) -> None:
        """Remove a directory of ours with all that is in it; no link in it is followed."""
        place = self._at(path, follow=False)
        if os.path.isdir(place) and not os.path.islink(place):
            # Here, as the machine half never does this, and it costs its start what reading twenty files would.
            import shutil

            shutil.rmtree(place)
        else:
            self.remove(path)

    def rename(self, old: str, new: str) -> None:
        """Rename within one file system, durably."""
        os.rename(self._at(old, follow=False), self._at(new, follow=False))
        self.sync_directory(os.path.dirname(new))

    def copy(self, reading: BinaryIO, target: str, mode: int, progress: Callable[[], None] = lambda: None) -> None:
        """A copy with data of its own, on disk when this returns; `progress` hears of parts of a large one."""
        # Here, as the machine half copies nothing.
        from agent.system.copying import copy_content

        with open(self._at(target, follow=False), "xb") as writing:
            copy_content(reading.fileno(), writing.fileno(), progress)
            os.fchmod(writing.fileno(), mode)
            os.fsync(writing.fileno())

    def open_lock(self, path: str) -> int:
        """A descriptor of a lock file, made if missing; the caller closes it."""
        return os.open(self._at(path, follow=False), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def sync_directory(self, path: str) -> None:
        """Make renames in a directory durable."""
        descriptor = os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _replacing(self, path: str) -> tuple[str, str]:
        """The place of a file to be replaced, and that of its successor, where a killed writer left nothing.

        One name for each file, so that such remains do not gather; and hidden, as programs read whole directories.
        """
        self.remove_remains(path)
        directory, name = os.path.split(self._at(path, follow=False))
        return f"{directory}/{name}", f"{directory}/.{name}{NEW}"

    def remove_remains(self, path: str) -> None:
        """What a killed `write` or `link` left beside the file that it was to replace."""
        directory, name = os.path.split(self._at(path, follow=False))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(f"{directory}/.{name}{NEW}")
