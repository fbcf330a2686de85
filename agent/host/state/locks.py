"""Locks between processes of the agent: flock(2) on files in /run/unbounded-agent."""

import fcntl
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from agent.model.errors import AgentError
from agent.model.paths import PASS_LOCK, RUNTIME, detach_lock_file, machine_lock_file
from agent.system.files import System

PASS_WAIT = 60.0
"""Seconds to wait for another process's pass to end: it may be staging a driver root."""
COMMAND_WAIT = 5.0
"""Seconds to wait for another command. The command may take minutes, but it may also be about to end."""
NOTICE = 2.0
"""Seconds after which a process says that it waits. Most passes take less."""
POLL = 0.05
"""Seconds between two attempts to get the lock. Attempts are repeated because flock(2) has no time limit."""


def pass_lock(system: System, progress: Callable[[str], None], until: float = math.inf) -> AbstractContextManager[None]:
    """Hold the lock that is needed to make a pass, and to write the host half's records.

    `progress` and `until` are the `progress` and `wait_until` of agent.host.reconcile.Reconciler. Raises AgentError if
    another process still has the lock after PASS_WAIT, or at the time `until`.
    """
    wait = min(PASS_WAIT, max(until - time.monotonic(), 0.0))
    return locked(system, PASS_LOCK, wait, "another pass of unbounded-agent is still running", progress)


def detach_lock(system: System, address: str) -> AbstractContextManager[None]:
    """Hold the lock of `gpus detach`, `gpus reset` and `gpus test` of this GPU: none may undo what another promised.

    `gpus attach` takes the lock only if the GPU is being reset: if it undoes a running `gpus detach`, that command
    notices it. Raises AgentError at once if another process holds the lock.
    """
    busy = f"another `gpus detach`, `gpus reset` or `gpus test` of {address} is still running"
    return locked(system, detach_lock_file(address), 0, busy)


@contextmanager
def machine_locks(system: System, names: Iterable[str], command: str, wait: float = COMMAND_WAIT) -> Iterator[None]:
    """Hold the locks of these machines. Every command that starts, stops, makes or removes a machine needs its lock.

    Otherwise `start` could start a machine that `reset` has just stopped in order to remove it. A machine's own unit
    and the service take no such lock, because a machine's start must not wait for a command. Raises AgentError, which
    names the command that holds a lock, if that command holds it for `wait` seconds.
    """
    with ExitStack() as stack:
        # All commands take the locks in the same order. Otherwise, two commands could each wait for the other.
        for name in sorted(set(names)):
            busy = f"another command is working on machine {name}"
            holder = f"`unbounded-agent {command}` (process {os.getpid()})"
            stack.enter_context(locked(system, machine_lock_file(name), wait, busy, holder=holder))
        yield


@contextmanager
def locked(
    system: System,
    path: str,
    wait: float,
    busy: str,
    progress: Callable[[str], None] = lambda _: None,
    holder: str = "",
) -> Iterator[None]:
    """Hold a lock. Raises AgentError with message `busy` if another process holds it for `wait` seconds.

    `holder` describes this process. It is shown to users of another process that has waited for this lock in vain: the
    error there ends with it. That other process must give a `holder`, too.
    """
    system.make_directory(RUNTIME)
    descriptor = system.open_lock(path)
    try:
        started, noticed = time.monotonic(), False
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            waited = time.monotonic() - started
            if waited >= wait:
                held_by = os.pread(descriptor, 200, 0).decode(errors="replace") if holder else ""
                raise AgentError(f"{busy}: {held_by}" if held_by else busy, f"see who holds the lock: `fuser {path}`")
            if waited >= NOTICE:
                progress("" if noticed else f"waiting up to {wait:.0f} s: {busy}")
                noticed = True
            time.sleep(POLL)
        if holder:
            # Only for messages: a full file system does not matter.
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, holder.encode(), 0)
        yield
    finally:
        os.close(descriptor)
