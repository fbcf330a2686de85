"""The machine half's backend of `agent.system.process`, which uses system calls only.

Importing subprocess would take as long as everything else that is loaded before the CDI generator starts.
"""

import errno
import os
import select

# Not from collections.abc, which would have to be loaded: it takes its names from this module, which is loaded already.
from _collections_abc import Callable

# Not from the module signal: that module loads the module enum, which takes longer to load than all of this module.
from _signal import SIGKILL, SIGPIPE, SIGXFSZ  # type: ignore[import-not-found]
from _thread import allocate_lock

from agent.system.process import ENVIRONMENT, OUTPUT_LIMIT, Completed, TimeLimitError, find_program

KILL_LIMIT = 5.0
"""Seconds to wait for a killed program. One that hangs in a driver cannot be killed, and is abandoned."""


class MachineRunner:
    """A Runner. At the time limit, it kills the program's process group: children that left the group stay."""

    def __init__(self) -> None:
        self._early: dict[tuple[str, ...], tuple[_Process, Callable[[], bool]]] = {}
        """By arguments: each program that `start` started and whose result was not asked for yet, with `is_current`."""
        # A lock is needed because steps in threads run programs too. It is not from the module threading, which takes
        # longer to import than this module.
        self._lock = allocate_lock()

    def start(self, argv: tuple[str, ...], is_current: Callable[[], bool]) -> None:
        """Start a program before its result is needed.

        When this runner is called with the same arguments, it returns the program's result. Until then, each call of
        this runner, with any arguments, first asks `is_current`, which returns False if something that the program
        depends on has changed. The program is then killed, and its result is not used. Raises OSError.
        """
        self._early[argv] = (_Process(argv), is_current)

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        with self._lock:
            # No other program may start while an outdated one runs.
            self._close_outdated()
            early = self._early.pop(argv, None)
        process = early[0] if early else _Process(argv)
        try:
            completed = process.wait(timeout)
        finally:
            ended = process.close()
        if completed is None:
            raise TimeLimitError if ended else TimeoutError(errno.ETIMEDOUT, "SIGKILL did not end it")
        return completed

    def close(self) -> None:
        """Kill the programs that `start` started and whose results were not needed."""
        while self._early:
            _, (process, _) = self._early.popitem()
            process.close()

    def _close_outdated(self) -> None:
        # An outdated program is killed even if the new call has other arguments, because both programs may write to the
        # same file. If SIGKILL does not end it at once, it hangs in a system call, and does nothing after that call.
        for argv in [argv for argv, (_, is_current) in self._early.items() if not is_current()]:
            process, _ = self._early.pop(argv)
            process.close()


class _Process:
    """A running program, in a new session. Its output goes to memory, so it can be read after the program has ended."""

    def __init__(self, argv: tuple[str, ...]) -> None:
        """Start the program. Raises OSError."""
        self._stdout, self._stderr = os.memfd_create("stdout"), os.memfd_create("stderr")
        self._descriptors = [self._stdout, self._stderr]
        self._runs = True
        try:
            self._pid = _spawn(argv, self._stdout, self._stderr)
        except OSError:
            self._close_descriptors()
            raise
        # A pidfd (Linux 5.3) can be waited for with a time limit.
        self._pidfd = os.pidfd_open(self._pid)
        self._descriptors.append(self._pidfd)

    def wait(self, timeout: float) -> Completed | None:
        """Return the result, or None if the program did not exit within `timeout` seconds."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(timeout * 1000):
            return None
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._runs = False
        return Completed(status, _content(self._stdout), _content(self._stderr))

    def close(self) -> bool:
        """If the program is still running, kill its process group. Return whether the program has ended."""
        if self._runs:
            # The process has not been reaped yet, so its id cannot belong to another one.
            os.killpg(self._pid, SIGKILL)
            self.wait(KILL_LIMIT)
        self._close_descriptors()
        return not self._runs

    def _close_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def _spawn(argv: tuple[str, ...], stdout: int, stderr: int) -> int:
    """Start a program and return its process id. posix_spawnp would search the caller's PATH, not ENVIRONMENT's."""
    return os.posix_spawn(
        find_program(argv[0]),
        argv,
        ENVIRONMENT,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, stdout, 1),
            (os.POSIX_SPAWN_DUP2, stderr, 2),
        ],
        setsid=True,
        # Python ignores these two signals, and the program would inherit that.
        setsigdef=(SIGPIPE, SIGXFSZ),
    )


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, min(os.fstat(descriptor).st_size, OUTPUT_LIMIT + 1), 0)
