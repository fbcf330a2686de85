"""The only door to files, processes and the system bus.

Every path is below one root prefix, so that recorded hosts can be observed.
"""

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from agent.model.device import DeviceNumber, FileIdentity
from agent.model.errors import BusError
from agent.system import opening
from agent.system.process import ENVIRONMENT, Bus, Runner, run_checked
from agent.system.rooted import Rooted

READ_LIMIT = 1 << 20
"""Bytes; we read nothing larger. The kernel refuses reads of 4 MiB and more in /proc/sys (KMALLOC_MAX_SIZE)."""
NEW = ".unbounded-agent-new"
"""Suffix of a file's successor while it is being written."""
BUS_LIMIT = 10.0
"""Seconds for an answer on the system bus: PID 1 does not answer while it reloads its units."""


class System(Rooted):
    """Files below `root`, programs through `runner`, services through `bus`. Raises OSError as the system calls do."""

    def __init__(self, runner: Runner, root: str = "/", bus: Bus | None = None) -> None:
        super().__init__(root)
        self._runner, self._bus = runner, bus

    def run(self, *argv: str, timeout: float = 30.0) -> str:
        """Return the standard output of a program that succeeded; raises CommandError."""
        return run_checked(self._runner, argv, timeout)

    def call(
        self, service: str, path: str, method: str, *arguments: object, signature: str = "", timeout: float = BUS_LIMIT
    ) -> tuple[object, ...]:
        """Call a method on the system bus and return its result; raises BusError. Default signature: all strings."""
        if self._bus is None:
            raise BusError(f"{method} of {service}: there is no connection to the system bus here")
        return self._bus(service, path, method, signature or "s" * len(arguments), arguments, timeout)

    # ---- reading

    def read(self, path: str, limit: int = READ_LIMIT) -> bytes:
        """Return a regular file's content (files of /proc and /sys are regular); never opens a FIFO or device."""
        return opening.content(opening.look_at(self._at(path)), path, limit)[0]

    def head(self, path: str, size: int) -> bytes:
        """Return the first bytes of a regular file of any size."""
        return opening.content(opening.look_at(self._at(path)), path, size, whole=False)[0]

    def read_untrusted(self, path: str, limit: int = READ_LIMIT) -> tuple[bytes, float]:
        """Like `read`, for a file that others may replace: refuses a link (ELOOP). Returns its change time too."""
        return opening.content(opening.look_at(self._at(path, follow=False), follow=False), path, limit)

    def read_text(self, path: str) -> str:
        """Like `read`, as text; surrogateescape keeps bytes that are not UTF-8."""
        return self.read(path).decode(errors="surrogateescape")

    def lines(self, path: str) -> Iterator[bytes]:
        """Yield the lines of a file of /proc of any size, without their end, which is a newline and nothing else."""
        with opening.plain(self._at(path)) as file:
            for line in file:
                yield line.removesuffix(b"\n")

    def entries(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a directory."""
        return tuple(sorted(os.listdir(self._at(path))))

    def find_program(self, name: str) -> str | None:
        """Return the path of the program that `run` would start by that name, skipping what cannot be started."""
        places = (f"{directory}/{name}" for directory in ENVIRONMENT["PATH"].split(":"))
        return next((path for path in places if self.exists(path) and os.access(self._at(path), os.X_OK)), None)

    def identity(self, path: str) -> FileIdentity:
        """Return a file's identity, links followed."""
        status = os.stat(self._at(path))
        return FileIdentity(
            status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, bool(status.st_mode & 0o111)
        )

    def mode(self, path: str) -> int:
        """Return a file's permission bits, links followed."""
        return stat.S_IMODE(os.stat(self._at(path)).st_mode)

    def device(self, path: str) -> DeviceNumber | None:
        """Return a character device's numbers; None for any other file or a removed one. Links are not followed."""
        status = os.lstat(self._at(path, follow=False))
        # No name left: it was bound into a machine and then removed on the host (a reload of nvidia-drm makes all DRI
        # nodes again). It still opens by its number, but the kernel refuses to bind it into a container (ENOENT).
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
        """Return a character device's major and minor, links followed; None for any other file.

        For /proc/PID/fd the kernel leads to the open file itself, wherever it is and whether or not it has a path.
        """
        # Imported here: few runs need it, and ctypes slows the machine's start.
        from agent.system.statx import character_device

        return character_device(self._at(link))

    def listening_process(self, path: str) -> int | None:
        """Return the process that listens on a Unix socket, see agent.system.sockets."""
        # Imported here: few runs need it, and it takes a twentieth of the machine half's start.
        from agent.system.sockets import listening_process

        return listening_process(self._at(path, follow=False))

    def architecture(self) -> str:
        """Return the kernel's machine name, uname(2): x86_64, aarch64."""
        return os.uname().machine

    def free_bytes(self, path: str) -> int:
        """Return the bytes that root may still use on the file system of a directory."""
        found = os.statvfs(self._at(path))
        return found.f_bavail * found.f_frsize

    def place(self, path: str) -> str:
        """Return the real path, links followed, for system calls that take names (inotify_add_watch(2))."""
        return self._at(path)

    # ---- writing

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents, each with mode 0755 whatever the umask, and synced like their content."""
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
                opening.sync_directory(os.path.dirname(directory))

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Replace a file atomically and durably: never half-written, whatever happens."""
        self.make_directory(os.path.dirname(path))
        with self._replacing(path) as temporary, opening.new_file(temporary) as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        self.sync_directory(os.path.dirname(path))

    def link(self, path: str, target: str) -> None:
        """Put a symbolic link in place atomically; replaces whatever is there except a directory."""
        self.make_directory(os.path.dirname(path))
        with self._replacing(path) as temporary:
            os.symlink(target, temporary)

    def remove(self, path: str) -> None:
        """Remove a file or link and sync the directory; no error if nothing is there."""
        place = self._at(path, follow=False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)
            opening.sync_directory(os.path.dirname(place))

    def remove_tree(self, path: str) -> None:
        """Remove a directory of ours with its content; follows no link in it."""
        place = self._at(path, follow=False)
        if os.path.isdir(place) and not os.path.islink(place):
            # Imported here: the machine half never does this, and it slows its start as much as reading twenty files.
            import shutil

            shutil.rmtree(place)
        else:
            self.remove(path)

    def rename(self, old: str, new: str) -> None:
        """Rename within one file system, durably."""
        os.rename(self._at(old, follow=False), self._at(new, follow=False))
        self.sync_directory(os.path.dirname(new))

    def copy(self, reading: BinaryIO, target: str, mode: int, progress: Callable[[], None] = lambda: None) -> None:
        """Copy the data, on disk when this returns; calls `progress` after each part of a large file."""
        # Imported here: the machine half copies nothing.
        from agent.system.copy import copy_content

        with opening.new_file(self._at(target, follow=False)) as writing:
            copy_content(reading.fileno(), writing.fileno(), progress)
            os.fchmod(writing.fileno(), mode)
            os.fsync(writing.fileno())

    def open_lock(self, path: str) -> int:
        """Return a descriptor of a lock file, made if missing; the caller closes it."""
        return opening.lock_file(self._at(path, follow=False))

    def put_aside(self, path: str) -> str:
        """Rename what is in the place of a file of ours to a name that no program reads, and return that name."""
        aside = f"{path}.damaged-{time.time_ns()}"
        self.rename(path, aside)
        return aside

    def sync_directory(self, path: str) -> None:
        """Make renames in a directory durable."""
        opening.sync_directory(self._at(path))

    @contextlib.contextmanager
    def _replacing(self, path: str) -> Iterator[str]:
        """Yield the path of a file's successor, which replaces the file at the end and is removed after an error.

        First removes what a killed writer left. One name for each file, so that leftovers do not pile up; and hidden,
        because programs read whole directories.
        """
        self.remove_remains(path)
        place = self._at(path, follow=False)
        temporary = remains(place)
        try:
            yield temporary
            os.rename(temporary, place)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    def remove_remains(self, path: str) -> None:
        """Remove what a killed `write` or `link` left next to the file that it was to replace."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(remains(self._at(path, follow=False)))


def remains(path: str) -> str:
    """Return the temporary path that `write` and `link` use, which remains if they are killed."""
    directory, name = os.path.split(path)
    return f"{directory}/.{name}{NEW}"
