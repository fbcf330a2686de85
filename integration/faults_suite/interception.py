"""Count the agent's system calls below a tree, and kill the agent at one of them or make that call fail.

The functions of `os`, and `open`, are replaced in this process. A kill acts like SIGKILL: nothing changes after that
call, whatever `finally` and `except` clauses try. Kills come before a call or halfway through it, never after it: the
state after a call is the state before the next one.
"""

import builtins
import errno
import fcntl
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

assert shutil.rmtree.avoids_symlink_attacks, "import shutil before replacing functions of `os`"

WRITING = (
    "mkdir", "rmdir", "unlink", "remove", "rename", "replace", "symlink", "link", "chmod", "fchmod", "chown", "fchown",
    "truncate", "ftruncate", "fsync", "fdatasync", "copy_file_range", "sendfile", "write", "mknod", "mkfifo", "utime",
)  # fmt: skip
READING = ("stat", "lstat", "fstat", "readlink", "listdir", "scandir", "statvfs", "access", "getxattr")
OPEN_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
TORN = ("write", "copy_file_range")
"""Calls that a kill or a full disk can interrupt halfway."""

Attribute: TypeAlias = Any
"""A function of a module: the replaced functions have many different signatures."""


class Killed(BaseException):
    """Stands for SIGKILL; none of our code catches this exception."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the agent."""

    name: str
    what: str
    """A path below the tree, or a command."""

    def __str__(self) -> str:
        return f"{self.name}({self.what})"


@dataclass(frozen=True, slots=True)
class Strike:
    """A kill or an error at one call."""

    number: int
    """Index among the writing or the reading calls, from 0."""
    code: int = 0
    """errno; 0 means a kill."""
    writing: bool = True
    torn: bool = False
    """Strike after half of the bytes are written."""


@dataclass(slots=True)
class Watch:
    """The calls below one tree, and the strike at one of them."""

    tree: str
    strike: Strike | None = None
    writing: list[Call] = field(default_factory=list)
    reading: list[Call] = field(default_factory=list)
    struck: Call | None = None
    dead: bool = False
    paused: int = 0

    def before_write(self, name: str, what: str) -> bool:
        """Count a writing call that the agent is about to make. Return whether to tear it. Raises Killed or OSError."""
        if self.paused:
            return False
        if self.dead:
            raise Killed
        self.writing.append(Call(name, what))
        return self._meet(len(self.writing) - 1, writing=True)

    def before_read(self, name: str, what: str) -> None:
        """Count a reading call that the agent is about to make. Raises OSError."""
        if not self.paused and not self.dead:
            self.reading.append(Call(name, what))
            self._meet(len(self.reading) - 1, writing=False)

    def _meet(self, number: int, *, writing: bool) -> bool:
        strike = self.strike
        if strike is None or (strike.number, strike.writing) != (number, writing):
            return False
        self.struck = (self.writing if writing else self.reading)[number]
        if strike.torn:
            return True
        self.end()
        return False

    def end(self) -> None:
        """Kill the agent or raise the error."""
        assert self.strike
        if not self.strike.code:
            self.dead = True
            raise Killed
        assert self.struck
        raise OSError(self.strike.code, os.strerror(self.strike.code), self.struck.what)

    def below(self, where: object) -> str | None:
        """Return the path in the tree that an argument denotes; None if it is elsewhere, or no path."""
        if isinstance(where, int) and not isinstance(where, bool):
            where = f"/proc/self/fd/{where}"
        if not isinstance(where, str | os.PathLike):
            return None
        path = os.fspath(where)
        if isinstance(path, bytes):
            return None
        if path.startswith("/proc/self/fd/"):
            try:
                path = REAL["readlink"](path).removesuffix(" (deleted)")
            except OSError:
                return None
        return path.removeprefix(self.tree) or "/" if path == self.tree or path.startswith(f"{self.tree}/") else None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count calls in this block: others make them, not the agent."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1


REAL: dict[str, Attribute] = {name: getattr(os, name) for name in (*WRITING, *READING, "open")}
REAL_OPEN, REAL_IOCTL = builtins.open, fcntl.ioctl
REAL_THREAD: dict[str, Attribute] = {name: getattr(threading.Thread, name) for name in ("start", "join")}


class _Writer:
    """A file open for writing, without a buffer. Python could write a buffer even after a simulated kill."""

    def __init__(self, watch: Watch, raw: Attribute) -> None:
        self._watch, self._raw = watch, raw

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def write(self, content: bytes) -> int:
        path = self._watch.below(self._raw.fileno())
        if path is not None and self._watch.before_write("write", path):
            self._raw.write(content[: len(content) // 2])
            self._watch.end()
        left = memoryview(content)
        while left:
            left = left[self._raw.write(left) :]
        return len(content)

    def __getattr__(self, name: str) -> Attribute:
        return getattr(self._raw, name)


def _resolves() -> bool:
    """Return whether the caller resolves links below a test's tree. On a real host, the kernel does that."""
    caller = sys._getframe(2).f_code
    return caller.co_name == "_resolve" and caller.co_filename.endswith("rooted.py")


def _exists(path: Attribute, *, dir_fd: int | None = None) -> bool:
    try:
        REAL["lstat"](path, dir_fd=dir_fd)
    except OSError:
        return False
    return True


def _writing(watch: Watch, name: str) -> Callable[..., Attribute]:
    def call(*arguments: Attribute, **options: Attribute) -> Attribute:
        # copy_file_range(2) writes its second file, all others their first.
        path = watch.below(arguments[1 if name == "copy_file_range" else 0])
        if path is None and options.get("dir_fd") is not None:
            directory = watch.below(options["dir_fd"])
            path = None if directory is None else f"{directory}/{arguments[0]}"
        if name in ("unlink", "remove") and path is not None and not _exists(*arguments, **options):
            # There is no such file, and the caller only makes sure of that: this call changes nothing.
            path = None
        if path is not None and watch.before_write(name, path):
            if name == "copy_file_range":
                half = os.fstat(arguments[0]).st_size // 2
                REAL[name](*arguments[:2], half)
            watch.end()
        return REAL[name](*arguments, **options)

    return call


def _reading(watch: Watch, name: str) -> Callable[..., Attribute]:
    def call(*arguments: Attribute, **options: Attribute) -> Attribute:
        if arguments and not _resolves() and (path := watch.below(arguments[0])) is not None:
            watch.before_read(name, path)
        return REAL[name](*arguments, **options)

    return call


def _open(watch: Watch) -> Callable[..., int]:
    def call(path: Attribute, flags: int, *arguments: Attribute, **options: Attribute) -> int:
        if (where := watch.below(path)) is not None:
            if flags & OPEN_TO_WRITE:
                watch.before_write("open", where)
            else:
                watch.before_read("open", where)
        return int(REAL["open"](path, flags, *arguments, **options))

    return call


def _open_file(watch: Watch) -> Callable[..., Attribute]:
    def call(file: Attribute, mode: str = "r", *arguments: Attribute, **options: Attribute) -> Attribute:
        where = watch.below(file)
        if where is None:
            return REAL_OPEN(file, mode, *arguments, **options)
        if not set(mode) & set("wxa+"):
            watch.before_read("read", where)
            return REAL_OPEN(file, mode, *arguments, **options)
        if not isinstance(file, int):
            watch.before_write("open", where)
        return _Writer(watch, REAL_OPEN(file, mode, 0))

    return call


def _ioctl(watch: Watch) -> Callable[..., Attribute]:
    def call(descriptor: Attribute, request: int, argument: Attribute = 0, *rest: Attribute) -> Attribute:
        if watch.below(descriptor) is not None:
            # FICLONE is never available, so that the calls do not depend on a file system with reflinks.
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return REAL_IOCTL(descriptor, request, argument, *rest)

    return call


@contextmanager
def watched(watch: Watch, *, in_order: bool = False) -> Iterator[Watch]:
    """Watch calls until the block ends. With `in_order`, threads run one after the other, in a fixed order."""
    for name in WRITING:
        setattr(os, name, _writing(watch, name))
    for name in READING:
        setattr(os, name, _reading(watch, name))
    os.open = _open(watch)
    builtins.open = _open_file(watch)
    fcntl.ioctl = _ioctl(watch)
    if in_order:
        for name, instead in (("start", _start), ("join", _join)):
            setattr(threading.Thread, name, instead)
    try:
        yield watch
    finally:
        for name, real in REAL.items():
            setattr(os, name, real)
        builtins.open, fcntl.ioctl = REAL_OPEN, REAL_IOCTL
        for name, real in REAL_THREAD.items():
            setattr(threading.Thread, name, real)


def _start(thread: threading.Thread) -> None:
    # A daemon thread works for other threads until the process exits. If run() were called here, it would not return.
    if thread.daemon:
        REAL_THREAD["start"](thread)
    else:
        thread.run()


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    if thread.daemon:
        REAL_THREAD["join"](thread, timeout)
