"""Starts the generators of CDI specifications before the rest of the machine half is loaded.

Measured with Python 3.11: the generators start after 26 ms of processor time, and without this module after 50 ms, once
for each handoff. Bare Python takes 9 ms.

A generator takes longer than everything else, and depends only on what the host provides: the driver root and the
device nodes. When the rest of the machine half runs the same command, it gets the result of the generator that was
started here. If the host has published the handoff again since, or if the commands differ, the rest of the machine half
starts a generator of its own.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from threading import Lock

from agent.model.paths import HANDOFF_NAME, HANDOFF_VERSION, MACHINE_HANDOFF_DIRECTORY, MACHINE_STATE, spec_directory
from agent.system import opening
from agent.system.deadlines import bounded
from agent.system.process import KILL_MARGIN, Completed, Program, TimeLimitError, host_runner
from agent.vendors.nvidia.command import generate_command

GENERATORS: Mapping[str, Callable[[str, str, Iterable[str]], tuple[str, ...]]] = {"nvidia": generate_command}
"""By vendor, a function that returns the generator's command for a driver root, an output directory and hooks."""

MARK = f"{MACHINE_STATE}/early"
"""A file with the last generation of the handoff for which generators were started. Generators are started early only
once per generation, because later runs may not need the result."""

LIMIT = 1 << 20
"""Bytes of the largest handoff. The value is SIZE_LIMIT of agent.model.handoff; importing it would take too long."""


class EarlyRunner:
    """A Runner that returns the results of programs that were started early."""

    def __init__(self) -> None:
        self._early: dict[tuple[str, ...], tuple[Program, Callable[[], bool]]] = {}
        """By arguments: each program that `start` started and whose result was not asked for yet, with `is_current`."""
        # Steps in threads run programs too.
        self._lock = Lock()

    def start(self, argv: tuple[str, ...], is_current: Callable[[], bool]) -> None:
        """Start a program before its result is needed. Raises OSError.

        When this runner is called with the same arguments, it returns the program's result. Until then, each call of
        this runner, with any arguments, first asks `is_current`, which returns False if something that the program
        depends on has changed. The program is then killed, and its result is not used.
        """
        self._early[argv] = (Program(argv), is_current)

    def __call__(self, argv: tuple[str, ...], timeout: float) -> Completed:
        with self._lock:
            # An outdated program is killed even if the new call has other arguments, because both programs may write to
            # the same file.
            for outdated in [each for each, (_, is_current) in self._early.items() if not is_current()]:
                self._kill(outdated)
            early = self._early.pop(argv, None)
        return _result(argv, early[0], timeout) if early else host_runner(argv, timeout)

    def close(self) -> None:
        """Kill the programs that `start` started and whose results were not needed."""
        for argv in tuple(self._early):
            self._kill(argv)

    def _kill(self, argv: tuple[str, ...]) -> None:
        # If SIGKILL does not end the program at once, it hangs in a system call, and does nothing after that call.
        with suppress(TimeLimitError, TimeoutError):
            _result(argv, self._early.pop(argv)[0], 0)


def _result(argv: tuple[str, ...], program: Program, timeout: float) -> Completed:
    return bounded(" ".join(argv), lambda: program.result(timeout), timeout + KILL_MARGIN)


def start_generators(runner: EarlyRunner, root: str = "") -> None:
    """Start the generators, unless that was done before for this generation of the handoff.

    Raises nothing: agent.machine.run reports errors.
    """
    # Any exception: the rest of the machine half starts the generators that were not started here.
    with suppress(Exception):
        _start_generators(runner, root)


def _start_generators(runner: EarlyRunner, root: str) -> None:
    path = f"{root}{MACHINE_HANDOFF_DIRECTORY}/{HANDOFF_NAME}"
    published = _identity(path)
    handoff = json.loads(_content(path))
    match handoff:
        case {"version": int(version), "generation": str(generation)} if version == HANDOFF_VERSION:
            if not _claim(generation, root):
                return
        case _:
            return
    for request in handoff["requests"]:
        match request:
            case {"vendor": str(vendor), "gpus": [_, *_], "driver_root": str(driver_root)} if driver_root:
                if vendor in GENERATORS:
                    directory = f"{root}{spec_directory(vendor)}"
                    os.makedirs(directory, exist_ok=True)
                    # The generator would follow a link, and hang on a FIFO. A directory raises an exception here.
                    for name in os.listdir(directory):
                        os.unlink(f"{directory}/{name}")
                    command = GENERATORS[vendor](driver_root, spec_directory(vendor), request.get("cdi_hooks", ()))
                    # While the rest of the machine half is loaded, the host may grant further GPUs, or bind nodes that
                    # were missing. In both cases it publishes the handoff again. The generator may have searched for
                    # GPUs before, so its result is used only if the handoff is still the same file.
                    runner.start(command, lambda: _identity(path) == published)


def _claim(generation: str, root: str) -> bool:
    """Record that generators are started for this generation. Return False if that was recorded before.

    Raises OSError.
    """
    mark = f"{root}{MARK}"
    with suppress(FileNotFoundError):
        if _content(mark) == generation.encode():
            return False
        os.unlink(mark)
    os.makedirs(f"{root}{MACHINE_STATE}", exist_ok=True)
    with opening.new_file(mark) as file:
        file.write(generation.encode())
    return True


def _identity(path: str) -> tuple[int, int] | None:
    """Return a value that changes when the host publishes the file again; None if the file cannot be observed."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def _content(path: str) -> bytes:
    return opening.content(opening.open_probe(path), path, LIMIT)[0]
