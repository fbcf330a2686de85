"""The machine half's backend of `agent.system.commands`: the standard library alone, which starts fastest."""

import contextlib
import os
import signal
import subprocess

from agent.system.commands import ENVIRONMENT, Completed, TimeLimitError

KILL_LIMIT = 5.0
"""Seconds that a killed program is waited for: one that hangs in a driver cannot be killed, and is left behind."""


class MachineRunner:
    """A Runner. Standard output and error are taken whole; the program's session is killed at the time limit."""

    def __init__(self) -> None:
        self._early: dict[tuple[str, ...], subprocess.Popen[bytes]] = {}

    def start(self, argv: tuple[str, ...]) -> None:
        """Let a program run before its result is asked for, by a call with the very same arguments."""
        self._early[argv] = _start(argv)

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        process = self._early.pop(argv, None) or _start(argv)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            _kill(process)
            raise TimeLimitError from error
        return Completed(process.returncode, stdout, stderr)

    def close(self) -> None:
        """Kill what was started and never asked for."""
        while self._early:
            _kill(self._early.popitem()[1])


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Not subprocess.run: it waits for the killed program without a limit.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_LIMIT)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _start(argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(ENVIRONMENT),
        cwd="/",
        start_new_session=True,
    )
