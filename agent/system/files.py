"""All access to files, processes and the system bus.

Every path is below a root prefix, so that tests can observe recorded hosts.
"""

import contextlib
import hashlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from agent.model.device import DeviceNumber, FileIdentity
from agent.model.errors import BusError
from agent.model.paths import RUNTIME, STATE
from agent.system import opening
from agent.system.process import ENVIRONMENT, Bus, Runner, run_checked
from agent.system.rooted import Rooted

if TYPE_CHECKING:
    # Not imported at run time, because the machine half copies nothing.
    from agent.system.copy import Copies

OWN_DIRECTORIES = (f"{STATE}/", f"{RUNTIME}/")
"""Prefixes of paths at which only the agent's files belong."""
READ_LIMIT = 1 << 20
"""Bytes of the largest file that is read, unless the caller gives a limit."""
NEW = ".unbounded-agent-new"
"""Suffix of a temporary file's name. Content is first written to this file, which then replaces the real file."""
BUS_LIMIT = 10.0
"""Seconds for an answer on the system bus: PID 1 does not answer while it reloads its units."""


class System(Rooted):
    """Files below `root`, programs through `runner`, services through `bus`. Raises OSError as the system calls do."""

    def __init__(
        self, runner: Runner, root: str = "/", bus: Bus | None = None, tool_runner: Runner | None = None
    ) -> None:
        super().__init__(root)
        self._runner, self._bus, self._tool_runner = runner, bus, tool_runner or runner

    def run(self, *argv: str, timeout: float = 30.0) -> str:
        """Run a program and return its standard output. Raises CommandError if it fails."""
        return run_checked(self._runner, argv, timeout)

    def run_tool(self, *argv: str, timeout: float) -> str:
        """Run a program as `run` does, but let it use proxies and write files of any size.

        It is killed if this process dies.
        """
        return run_checked(self._tool_runner, argv, timeout)

    def call(
        self, service: str, path: str, method: str, *arguments: object, signature: str = "", timeout: float = BUS_LIMIT
    ) -> tuple[object, ...]:
        """Call a method on the system bus and return its result. Raises BusError.

        Without a signature, all arguments are strings.
        """
        if self._bus is None:
            raise BusError(f"{method} of {service}: no connection to the system bus")
        return self._bus(service, path, method, signature or "s" * len(arguments), arguments, timeout)

    # ---- reading

    def read(self, path: str, limit: int = READ_LIMIT) -> bytes:
        """Return the content of a regular file, also in /proc or /sys. Never opens a FIFO or device."""
        return opening.content(opening.open_probe(self._at(path)), path, limit)[0]

    def head(self, path: str, size: int) -> bytes:
        """Return the first bytes of a regular file of any size."""
        return opening.content(opening.open_probe(self._at(path)), path, size, whole=False)[0]

    def digest(self, path: str) -> str:
        """Return the SHA-256 digest of a regular file of any size, in hexadecimal."""
        with opening.plain(self._at(path)) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def read_untrusted(self, path: str, limit: int = READ_LIMIT) -> tuple[bytes, float]:
        """Return content and change time of a file that other users may replace. Raises OSError (ELOOP) for a link."""
        return opening.content(opening.open_probe(self._at(path, follow=False), follow=False), path, limit)

    def read_text(self, path: str) -> str:
        """Return the content of a regular file as text. Bytes that are not UTF-8 become surrogates."""
        return self.read(path).decode(errors="surrogateescape")

    def attribute(self, path: str) -> str:
        """Return the text of a short file in /sys or /proc, with fewer system calls than `read_text`.

        The file's type is not checked, because only the kernel can make files there. For a file that a driver provides,
        use `deadlines.read_device_text`: reading it may block.
        """
        return opening.attribute(self._at(path)).decode(errors="surrogateescape")

    def lines(self, path: str) -> Iterator[bytes]:
        """Yield the lines of a file in /proc, of any size, without the newline. Only a newline ends a line."""
        with opening.plain(self._at(path)) as file:
            for line in file:
                yield line.removesuffix(b"\n")

    def entries(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a directory."""
        return tuple(sorted(os.listdir(self._noted(self._at(path), follow=True, inside=True))))

    def some_entries(self, path: str, limit: int) -> tuple[str, ...]:
        """Return the names in a directory into which pods may put any number: no more than `limit`, sorted."""
        with os.scandir(self._at(path)) as found:
            return tuple(sorted(each.name for _, each in zip(range(limit), found, strict=False)))

    def find_program(self, name: str) -> str | None:
        """Return the path of the program that `run` would start by that name; None if there is none."""
        places = (f"{directory}/{name}" for directory in ENVIRONMENT["PATH"].split(":"))
        return next((path for path in places if self.exists(path) and os.access(self._at(path), os.X_OK)), None)

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
        return DeviceNumber(
            os.major(status.st_rdev),
            os.minor(status.st_rdev),
            stat.S_IMODE(status.st_mode),
            status.st_uid,
            status.st_gid,
        )

    def device_behind(self, link: str) -> tuple[int, int] | None:
        """Return a character device's major and minor; None for any other file. Links are followed.

        A link in /proc/PID/fd leads to the open file itself, wherever it is and whether or not it has a path.
        """
        # Imported here: few runs need it, and ctypes slows the machine half's start.
        from agent.system.statx import character_device

        return character_device(self._at(link))

    def listening_process(self, path: str) -> int | None:
        """Return the id of the process that listens on a Unix socket; None if none answers (agent.system.sockets)."""
        # Imported here: few runs need it, and it takes a twentieth of the machine half's start.
        from agent.system.sockets import listening_process

        return listening_process(self._at(path, follow=False))

    def architecture(self) -> str:
        """Return the kernel's machine name, uname(2): x86_64, aarch64."""
        return os.uname().machine

    def free_bytes(self, path: str) -> int:
        """Return the free bytes of the file system that a directory is on, without those that are reserved for root."""
        status = os.statvfs(self._at(path))
        return status.f_bavail * status.f_frsize

    def free_files(self, path: str) -> int:
        """Return how many files can still be made on the file system that a directory is on."""
        status = os.statvfs(self._at(path))
        # Some file systems have no limit, and say 0 of 0.
        return status.f_favail if status.f_files else sys.maxsize

    def full_path(self, path: str) -> str:
        """Return the path with the root prefix, for system calls that take paths (inotify_add_watch(2))."""
        return self._at(path)

    # ---- writing

    def make_directory(self, path: str) -> None:
        """Make a directory and its missing parents durably, each with mode 0755 whatever the umask."""
        place = self._at(path)
        missing = []
        while not os.path.isdir(place):
            missing.append(place)
            place = os.path.dirname(place)
        for directory in reversed(missing):
            # Another thread, or another service of the agent, may make it meanwhile.
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
                os.chmod(directory, 0o755)
                opening.sync_directory(os.path.dirname(directory))

    def make_private(self, path: str) -> None:
        """Make a directory, or change it, so that only root may enter it.

        For root file systems, which have device nodes and perhaps vulnerable setuid programs.
        """
        self.make_directory(path)
        if self.mode(path) & 0o077:
            os.chmod(self._at(path), 0o700)

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Replace a file atomically and durably: no reader ever sees a part of the content."""
        self._write(path, content, mode, durable=True)

    def write_quickly(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Replace a file atomically. Until `sync`, a crash of the kernel may leave the old file or a damaged one."""
        self._write(path, content, mode, durable=False)

    def _write(self, path: str, content: bytes, mode: int, *, durable: bool) -> None:
        self.make_directory(os.path.dirname(path))
        with self._named(path), self._replacing(path) as temporary, opening.new_file(temporary) as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if durable:
                os.fsync(file.fileno())
        if durable:
            self.sync_directory(os.path.dirname(path))

    def sync(self, path: str) -> None:
        """Make what `write_quickly` wrote durable."""
        with opening.plain(self._at(path)) as file:
            os.fsync(file.fileno())
        self.sync_directory(os.path.dirname(path))

    def write_kernel(self, path: str, value: str) -> None:
        """Write to an existing file of the kernel, such as one in /proc/sys."""
        opening.write_existing(self._at(path), value.encode())

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link atomically. The link replaces anything but a directory."""
        self.make_directory(os.path.dirname(path))
        with self._named(path), self._replacing(path) as temporary:
            os.symlink(target, temporary)

    def remove(self, path: str) -> None:
        """Remove a file or link, if it exists, and sync the directory."""
        place = self._at(path, follow=False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)
            opening.sync_directory(os.path.dirname(place))

    def remove_tree(self, path: str) -> None:
        """Remove a directory of the agent with its content, or a file or link in its place. Follows no links.

        Raises OSError, for example if anything is mounted there (agent.system.removal).
        """
        place = self._at(path, follow=False)
        if os.path.isdir(place) and not os.path.islink(place):
            # Imported here: the machine half seldom needs it.
            from agent.system import removal

            removal.remove(place)
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

    def copy(self, reading: BinaryIO, target: str, mode: int, copies: "Copies") -> None:
        """Copy the data of an open file to a new one, as one of `copies`. The caller syncs the directory."""
        copies.add(reading, opening.new_file(self._at(target, follow=False)), mode)

    def open_lock(self, path: str) -> int:
        """Return a descriptor of a lock file, which is made if it is missing. The caller closes the descriptor."""
        return opening.lock_file(self._at(path, follow=False))

    def put_aside(self, path: str) -> str:
        """Rename whatever is in the place of one of the agent's files, and return its new path."""
        aside = f"{path}.damaged-{time.time_ns()}"
        self.rename(path, aside)
        return aside

    def sync_directory(self, path: str) -> None:
        """Make renames in a directory durable."""
        opening.sync_directory(self._at(path))

    @contextlib.contextmanager
    def _replacing(self, path: str) -> Iterator[str]:
        """Yield the path of a temporary file, which replaces the file at `path` when the block ends.

        After an error, the temporary file is removed instead. Its name is always the same, so that leftovers of killed
        writers do not pile up: the next writer removes them. The name begins with a dot, so that programs that read
        whole directories skip the file. If somebody made a directory with that name, the directory is put aside; one
        with the file's own name only where nothing but the agent's files belongs.
        """
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
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    @contextlib.contextmanager
    def _named(self, path: str) -> Iterator[None]:
        """Let an OSError of the block name this path: the kernel's error for a full disk names no file."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(error.errno, error.strerror, path) from error

    def remove_temporary(self, path: str) -> None:
        """Remove the temporary file that a killed `write` or `link` left."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(temporary_path(self._at(path, follow=False)))


def temporary_path(path: str) -> str:
    """Return the path of the temporary file that `write` and `link` use. If they are killed, it stays."""
    directory, name = os.path.split(path)
    return f"{directory}/.{name}{NEW}"
