"""Opens files without blocking. Only `stream` may open a device.

DOORS in tests/project/test_layers.py lists the few other modules that may open files.

Machines, pods and users can put anything where the agent reads. Opening a FIFO waits for its writer, opening a
watchdog starts it, and a write lease (F_SETLEASE in fcntl(2)) blocks an open for 45 s.
"""

import errno
import fcntl
import io
import os
import stat

PART = 64 << 10
"""Bytes that are read at once: for larger parts, Python would map new memory. The size of a file may be unknown."""
LEASED = "another process holds a lease on it"


def open_probe(place: str, *, follow: bool = True) -> int:
    """Return a descriptor with which a file can be inspected, but not read (O_PATH).

    This breaks no lease and starts no device.
    """
    return os.open(place, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))


def open_directory(place: str) -> int:
    """Return a descriptor of a directory, to list it. Raises OSError for a link."""
    return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def sync_directory(place: str) -> None:
    """Make renames, new names and removals in a directory durable."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def regular(probe: int, path: str) -> io.BufferedReader:
    """Open, for reading, the file behind a descriptor from `open_probe`. Raises OSError unless the file is regular."""
    return open(_regular(probe, os.fstat(probe).st_mode, path), "rb")


def _regular(probe: int, mode: int, path: str) -> int:
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "a symbolic link", path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    try:
        # This opens the file that `open_probe` found, even if its name belongs to another file now.
        return stream(f"/proc/self/fd/{probe}")
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, LEASED, path) from None


def plain(place: str) -> io.BufferedReader:
    """Open, for reading, a regular file that only the kernel, the agent or an administrator writes. Raises OSError."""
    probe = open_probe(place)
    try:
        return regular(probe, place)
    finally:
        os.close(probe)


def content(probe: int, path: str, limit: int, *, whole: bool = True) -> tuple[bytes, float]:
    """Return the content and the change time (seconds since the epoch) of the file behind an O_PATH descriptor.

    If the file has more than `limit` bytes, raises OSError (EFBIG) or, if not `whole`, returns the first `limit` bytes.
    Callers take a file's age from its change time, because its writer can set the modification time. Closes `probe`.
    """
    try:
        status = os.fstat(probe)
        descriptor = _regular(probe, status.st_mode, path)
    finally:
        os.close(probe)
    parts, missing = [], limit + 1
    try:
        while missing and (part := os.read(descriptor, min(PART, missing))):
            parts.append(part)
            missing -= len(part)
    except OSError as error:
        # An error of read(2) has no path.
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(descriptor)
    if whole and not missing:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", path)
    return b"".join(parts)[:limit], status.st_ctime


def stream(place: str) -> int:
    """Open a file for reading or polling. Neither the open nor a later read(2) blocks."""
    return os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def new_file(place: str) -> io.BufferedWriter:
    """Create a file for writing, which only its owner may read whatever the umask. Raises FileExistsError."""
    return open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb")


def write_existing(place: str, value: bytes) -> None:
    """Write to an existing file in one system call: procfs takes each call as a whole value."""
    descriptor = os.open(place, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value)
    finally:
        os.close(descriptor)


def kept_locked(file: io.BufferedWriter) -> int:
    """Lock a new file (flock(2)) until the descriptor that is returned is closed, or this process ends."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return os.dup(file.fileno())


def is_locked(place: str) -> bool:
    """Return whether somebody keeps a regular file locked. This does not wait. Raises OSError."""
    with plain(place) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def new_pipe(place: str) -> None:
    """Make a FIFO, which only root may open. The agent opens none. Raises FileExistsError."""
    os.mkfifo(place, 0o600)


def lock_file(place: str) -> int:
    """Return a descriptor of a lock file, which no other user may open. It is made if it is missing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    return os.open(place, flags, 0o600)
