"""Watches directories for names that appear, disappear or change, with inotify(7).

inotify_simple only wraps the system calls. pyroute2's Inotify is not used, because it has no non-blocking read, treats
a failed inotify_add_watch(2) as a success, and exits when events overflow.
"""

import contextlib
import os
import select
from collections.abc import Callable, Iterable, Mapping

from inotify_simple import INotify, flags

from agent.system import opening
from agent.system.files import System

NODES = flags.CREATE | flags.DELETE | flags.MOVED_FROM | flags.MOVED_TO | flags.ATTRIB
"""Events of device nodes. CLOSE_WRITE is not one of them, because any program that closes a GPU's node causes it."""
FILES = NODES | flags.CLOSE_WRITE
"""Events of regular files."""
DIRECTORY = flags.ONLYDIR | flags.MOVE_SELF
"""Flags for the directory itself. MOVE_SELF is needed, because a move of the directory causes no event without this
flag. The directory's removal always causes an event (IN_IGNORED)."""
ANY = ""
"""Stands for any name: the directory itself appeared, changed or disappeared, or events were lost."""
MOUNTS = "/proc/self/mountinfo"
"""poll(2) reports POLLERR and POLLPRI for this file after mounts in this mount namespace have changed (proc(5))."""


class Directories:
    """An event source: directories, which may appear and disappear."""

    def __init__(
        self,
        name: str,
        system: System,
        where: Callable[[], Iterable[str]],
        matters: Callable[[str, str], bool],
        events: int = NODES,
        mounts: bool = False,
    ) -> None:
        """Set what is watched: the directories that `where` returns.

        `matters` decides whether a change needs a pass. It gets a directory, and the changed name in it or ANY. With
        `mounts`, changes of mounts are noticed too, because file systems may be mounted over the directories.
        """
        self.name = name
        self._system, self._where, self._matters = system, where, matters
        self._events, self._with_mounts = events, mounts
        self._inotify: INotify | None = None
        self._mounts: int | None = None
        self._watched: dict[str, int] = {}
        """Watch descriptors by path. If two paths lead to the same directory, they have the same descriptor. Its events
        are then attributed to one of the two paths."""

    def open(self) -> None:
        self._inotify = INotify(nonblocking=True)
        if self._with_mounts:
            self._mounts = opening.stream(MOUNTS)
        self._watch(self._inotify)

    def close(self) -> None:
        self._watched = {}
        if self._inotify is not None:
            # The descriptor may be bad (EBADF): that can be the reason for closing it.
            with contextlib.suppress(OSError):
                self._inotify.close()
        if self._mounts is not None:
            with contextlib.suppress(OSError):
                os.close(self._mounts)
        self._inotify = self._mounts = None

    def polled(self) -> Mapping[int, int]:
        polled = {} if self._inotify is None else {self._inotify.fileno(): select.POLLIN}
        return polled if self._mounts is None else polled | {self._mounts: select.POLLPRI}

    def needs_pass(self) -> bool:
        if self._inotify is None:
            return False
        paths = {watch: path for path, watch in self._watched.items()}
        # A set, because thousands of events for one name need only one check.
        touched: set[tuple[str, str]] = set()
        for event in self._inotify.read(timeout=0):
            if event.mask & flags.Q_OVERFLOW:
                touched |= {(path, ANY) for path in self._watched}
            elif path := paths.get(event.wd):
                touched.add((path, event.name))
                if event.mask & flags.IGNORED:
                    self._watched.pop(path, None)
        touched |= {(path, ANY) for path in self._watch(self._inotify)}
        # A list, not a generator: `matters` may keep state, so it must be called for each name.
        return any([self._matters(path, name) for path, name in sorted(touched)])

    def _watch(self, inotify: INotify) -> list[str]:
        """Watch the directories that exist now. Return those that are new, were replaced, or no longer exist."""
        wanted, changed = tuple(self._where()), []
        for path in wanted:
            try:
                # If the inode is watched already, the kernel returns the existing watch descriptor.
                watch = inotify.add_watch(self._system.full_path(path), self._events | DIRECTORY)
            except (FileNotFoundError, NotADirectoryError):
                if self._forget(inotify, path):
                    changed.append(path)
                continue
            if self._watched.get(path) != watch:
                self._forget(inotify, path)
                self._watched[path] = watch
                changed.append(path)
        for path in self._watched.keys() - set(wanted):
            self._forget(inotify, path)
        return changed

    def _forget(self, inotify: INotify, path: str) -> bool:
        watch = self._watched.pop(path, None)
        if watch is None:
            return False
        # This fails with EINVAL if the directory was removed, because the kernel has then removed the watch too.
        with contextlib.suppress(OSError):
            inotify.rm_watch(watch)
        return True
