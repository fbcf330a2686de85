"""Defines how programs are run and bus services called, and describes failures in the same words for all backends."""

import errno
import os
import resource
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from signal import SIGKILL, SIGPIPE, SIGXFSZ
from typing import BinaryIO, NamedTuple

from agent.model.errors import CommandError, ExitCodeError, UnkillableError, UnreadError
from agent.system.deadlines import bounded

OUTPUT_LIMIT = 16 << 20
"""Bytes that a program may print. One more byte is read, to detect that there were more."""
FILE_LIMIT = 4 * OUTPUT_LIMIT
"""Bytes of the largest file that a program of the host half may write, including the file in memory for its output. The
machine half's unit sets the same limit (LimitFSIZE=). Programs of `System.run_tool` have no limit."""

KILLED_HINT = "probably because the memory, or the unit's MemoryMax=, was used up: see `journalctl -k --grep=oom`"
"""What to do about SIGKILL that does not come from the agent."""

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
}
"""The whole environment of the programs that the agent runs. They inherit nothing (CVE-2025-23266), except that
programs of `System.run_tool` inherit the settings of proxies. Messages are not translated."""


def find_program(name: str) -> str:
    """Return the path of a program. `name` is its path, or a name that is looked for in ENVIRONMENT's PATH.

    Raises FileNotFoundError if there is none, and PermissionError if there are only files that must not be executed.
    """
    places = (name,) if "/" in name else tuple(f"{each}/{name}" for each in ENVIRONMENT["PATH"].split(":"))
    files = [place for place in places if os.path.isfile(place)]
    for file in files:
        if os.access(file, os.X_OK):
            return file
    if files:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), files[0])
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


class Completed(NamedTuple):
    """The result of a program that was not stopped at its time limit."""

    status: int
    """The exit code, or minus the number of the signal that killed the program."""
    stdout: bytes
    stderr: bytes


class TimeLimitError(Exception):
    """The backend killed the program at its time limit."""


class StillRunningError(TimeoutError):
    """Not even SIGKILL ended the program. `pid` is its process id."""

    def __init__(self, why: str | None, pid: int) -> None:
        super().__init__(errno.ETIMEDOUT, why)
        self.pid = pid


Runner = Callable[[tuple[str, ...], float], Completed]
"""Runs a program and returns the result. Takes the arguments and the time limit in seconds.

The program runs in `/` with ENVIRONMENT and an empty standard input. Raises OSError if it cannot start
(FileNotFoundError if there is no such program), TimeLimitError if it was killed at its time limit, and TimeoutError if
not even SIGKILL ended it.
"""


Bus = Callable[[str, str, str, str, tuple[object, ...], float], tuple[object, ...]]
"""Calls a method on the system bus and returns its result, in which a variant is a pair of signature and value.

Takes the service, the object path, the method (`INTERFACE.MEMBER`), the signature, the arguments, and the time limit in
seconds. If the connection breaks before the answer, the method may be called twice. Raises BusError; if there was no
answer in time, its cause is a TimeoutError.
"""


def run_checked(runner: Runner, argv: tuple[str, ...], timeout: float) -> str:
    """Run a program and return its standard output, with undecodable bytes as surrogates. Raises CommandError."""
    try:
        completed = runner(argv, timeout)
    except TimeLimitError as error:
        raise CommandError(argv, f"stopped after its time limit of {timeout:.0f} s") from error
    except TimeoutError as error:
        hint = "it cannot even be killed: see `dmesg` for the disk or device that it waits for"
        if isinstance(error, StillRunningError):
            raise UnkillableError(argv, error.strerror or "no answer", hint, error.pid) from error
        raise CommandError(argv, error.strerror or "no answer", hint=hint) from error
    except FileNotFoundError as error:
        raise CommandError(argv, "not found", hint=f"install the package that contains {argv[0]}") from error
    except OSError as error:
        raise CommandError(argv, f"cannot be started: {error.strerror}") from error
    if completed.status < 0:
        raise _killed(argv, -completed.status, completed.stderr.decode(errors="replace"))
    if completed.status > 0:
        stdout, stderr = (each.decode(errors="replace") for each in (completed.stdout[:OUTPUT_LIMIT], completed.stderr))
        raise ExitCodeError(argv, completed.status, stderr, stdout)
    if len(completed.stdout) > OUTPUT_LIMIT:
        raise CommandError(argv, f"printed more than {OUTPUT_LIMIT} bytes")
    return completed.stdout.decode(errors="surrogateescape")


def _killed(argv: tuple[str, ...], number: int, stderr: str) -> CommandError:
    """Return the error for a program that was killed by the signal with this number."""
    if number == SIGXFSZ:
        return CommandError(argv, f"killed, because its output, or a file that it wrote, exceeds {FILE_LIMIT} bytes")
    if number == SIGPIPE:
        return UnreadError(argv, "killed, because nobody read what it wrote", stderr)
    return CommandError(argv, f"killed by signal {number}", stderr, KILLED_HINT if number == SIGKILL else "")


KILL_MARGIN = 3.0
"""Seconds that a killed program gets to exit."""


def completed(pid: int, wait: Callable[[], int], stdout: BinaryIO, stderr: BinaryIO, timeout: float) -> Completed:
    """Return the result of a program when it has ended. `wait` returns its status.

    At the time limit, kill it and what it started, except processes with a session or process group of their own, and
    raise TimeLimitError.
    """
    in_time = False
    try:
        in_time = _ends_within(pid, timeout)
    finally:
        if not in_time:
            kill_group(pid)
        status = wait()
    if not in_time:
        raise TimeLimitError
    # At most one byte more than OUTPUT_LIMIT.
    printed = (
        os.pread(file.fileno(), min(os.fstat(file.fileno()).st_size, OUTPUT_LIMIT + 1), 0) for file in (stdout, stderr)
    )
    return Completed(status, *printed)


def host_runner(argv: tuple[str, ...], timeout: float) -> Completed:
    """Run a program in a new session without a controlling terminal, as a Runner does.

    If Ctrl-C interrupts this, the program is killed. If not even SIGKILL ends the program, this raises
    StillRunningError; until the program has ended, further calls with the same arguments raise TimeoutError.
    """
    running: list[int] = []
    starting = threading.Lock()

    def run() -> Completed:
        program = find_program(argv[0])
        with memory_file("stdout") as stdout, memory_file("stderr") as stderr:
            try:
                # Without preexec_fn, Popen uses vfork. A fork would copy the page tables of the whole service.
                with starting:
                    process = subprocess.Popen(
                        argv,
                        executable=program,
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        cwd="/",
                        env=ENVIRONMENT,
                        start_new_session=True,
                    )
                    running.append(process.pid)
            except FileNotFoundError as error:
                # `find_program` has just found the program. So its interpreter or dynamic loader is missing.
                raise OSError(errno.ENOEXEC, "not a program that this host can run", program) from error
            # The program's output is a file in memory, which counts towards this unit's memory limit: if the program
            # could print without end, the kernel might kill the service. The limit is set only after the start, because
            # setting it between fork and exec would rule out vfork. The program could be started by prlimit(1), which
            # sets the limit first. But if the file is not a program, prlimit(1) makes a shell run the file.
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
            try:
                return completed(process.pid, process.wait, stdout, stderr, timeout)
            finally:
                running.clear()

    try:
        # All threads involved are daemon threads, so none of them keeps this process from exiting.
        return bounded(" ".join(argv), run, timeout + KILL_MARGIN)
    except TimeoutError as error:
        if running:
            raise StillRunningError(error.strerror, running[0]) from error
        raise
    except KeyboardInterrupt:
        # The terminal's Ctrl-C does not reach the program, because the program has a session of its own.
        # It may have just been started, but not be listed yet. A start from a disk that hangs is not waited for.
        starting.acquire(timeout=KILL_MARGIN)
        for pid in running:
            kill_group(pid)
        raise


def memory_file(name: str) -> BinaryIO:
    """Return a file in memory for output: pipes would need threads, and stay open while a program's children run."""
    return open(os.memfd_create(name), "w+b", buffering=0)


def _ends_within(pid: int, timeout: float) -> bool:
    """Return whether the process exits within `timeout` seconds.

    Popen and the package sh could wait too. But they check at intervals, and so notice the exit later.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        # The package sh has started the process, which has exited since: a thread of sh has collected its exit status.
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(pidfd)


def kill_group(pid: int) -> None:
    """Kill the process and what it started, except processes with their own session or group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
