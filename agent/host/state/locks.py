"""Locks between processes of the agent: flock(2) on files in /run/unbounded-agent."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from agent.model.errors import AgentError
from agent.model.paths import RUNTIME
from agent.system.files import System

POLL = 0.05
"""Seconds between two attempts to get the lock. Attempts are repeated because flock(2) has no time limit."""


@contextmanager
def locked(system: System, path: str, wait: float, busy: str) -> Iterator[None]:
    """Hold a lock. Raises AgentError with message `busy` if another process holds it for `wait` seconds."""
    system.make_directory(RUNTIME)
    descriptor = system.open_lock(path)
    try:
        deadline = time.monotonic() + wait
        while not _try(descriptor):
            if time.monotonic() >= deadline:
                raise AgentError(busy, f"see who holds it: `fuser {path}`")
            time.sleep(POLL)
        yield
    finally:
        os.close(descriptor)


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
