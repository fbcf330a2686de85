"""Defines how programs are run and bus services called, and describes failures in the same words for all backends."""

import errno
import os
from collections.abc import Callable, Mapping
from signal import SIGKILL, SIGXFSZ
from typing import NamedTuple

from agent.model.errors import CommandError, ExitCodeError

OUTPUT_LIMIT = 16 << 20
"""Bytes that a program may print. One more byte is read, to detect that there were more."""
FILE_LIMIT = 4 * OUTPUT_LIMIT
"""Bytes of the largest file that a program of the host half may write, including the file in memory for its output. The
machine half's unit sets the same limit (LimitFSIZE=). Programs of `System.run_tool` have no limit."""

KILLED_HINT = (
    "probably by the kernel, because the memory, or the unit's limit of memory (MemoryMax=), was used up: "
    "`journalctl -k --grep=oom` says so"
)
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
        raise CommandError(argv, error.strerror or "no answer", hint=hint) from error
    except FileNotFoundError as error:
        raise CommandError(argv, "not found", hint=f"install the package that contains {argv[0]}") from error
    except OSError as error:
        raise CommandError(argv, f"cannot be started: {error.strerror}") from error
    if completed.status == -SIGXFSZ:
        raise CommandError(argv, f"killed, because its output, or a file that it wrote, exceeds {FILE_LIMIT} bytes")
    if completed.status != 0:
        stderr = completed.stderr.decode(errors="replace")
        if completed.status < 0:
            hint = KILLED_HINT if completed.status == -SIGKILL else ""
            raise CommandError(argv, f"killed by signal {-completed.status}", stderr, hint)
        raise ExitCodeError(argv, completed.status, stderr, completed.stdout[:OUTPUT_LIMIT].decode(errors="replace"))
    if len(completed.stdout) > OUTPUT_LIMIT:
        raise CommandError(argv, f"printed more than {OUTPUT_LIMIT} bytes")
    return completed.stdout.decode(errors="surrogateescape")
