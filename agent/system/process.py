"""How programs run: one protocol, one wording of failures. The backends only start processes."""

import signal
from collections.abc import Callable, Mapping

from agent.model.errors import CommandError, ExitCodeError

OUTPUT_LIMIT = 16 << 20
"""Bytes of standard output that are read from any program, plus one, which shows that there were more."""
FILE_LIMIT = 4 * OUTPUT_LIMIT
"""Bytes of a file that a program of the host half may write: its output goes to a file in memory. The unit of the
machine half sets the same (LimitFSIZE=)."""

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
}
"""The whole environment of a program that we run: nothing is inherited (CVE-2025-23266), messages untranslated."""


class Completed:
    """A program that ended by itself."""

    # Neither a data class nor a named tuple: this is loaded before a machine's generator is started, and either would
    # delay that by a tenth.
    __slots__ = ("status", "stderr", "stdout")

    def __init__(self, status: int, stdout: bytes, stderr: bytes) -> None:
        """`status` is the exit code, or minus the signal's number."""
        self.status, self.stdout, self.stderr = status, stdout, stderr


class TimeLimitError(Exception):
    """The backend killed the program at its time limit."""


Runner = Callable[[tuple[str, ...], float], Completed]
"""Starts a program (arguments, time limit in seconds) with a null standard input and ENVIRONMENT, in `/`, and waits.

Raises FileNotFoundError or PermissionError if it cannot start, TimeLimitError if it ran out of time, and
TimeoutError if not even SIGKILL ended it then.
"""


Bus = Callable[[str, str, str, str, tuple[object, ...], float], tuple[object, ...]]
"""Calls a method on the system bus and returns its result; a variant is a pair of signature and value.

Takes service, object path, interface and member with a dot between, signature and arguments, and a time limit in
seconds. The method may be called twice if the bus restarts meanwhile. Raises BusError, caused by a TimeoutError if
there was no answer in time.
"""


def run_checked(runner: Runner, argv: tuple[str, ...], timeout: float) -> str:
    """Return the standard output of a program that succeeded, undecodable bytes as surrogates; else CommandError."""
    try:
        completed = runner(argv, timeout)
    except TimeLimitError as error:
        raise CommandError(argv, f"stopped after its time limit of {timeout:.0f} s") from error
    except TimeoutError as error:
        hint = "it cannot even be killed: see the kernel's log for the disk or device that it waits for"
        raise CommandError(argv, error.strerror or "no answer", hint=hint) from error
    except FileNotFoundError as error:
        raise CommandError(argv, "not found", hint=f"install the package that has {argv[0]}") from error
    except OSError as error:
        raise CommandError(argv, f"cannot be started: {error.strerror}") from error
    if completed.status == -signal.SIGXFSZ:
        raise CommandError(argv, f"ended, as it printed more than {FILE_LIMIT} bytes")
    if completed.status != 0:
        stderr = completed.stderr.decode(errors="replace")
        if completed.status < 0:
            raise CommandError(argv, f"killed by signal {-completed.status}", stderr)
        raise ExitCodeError(argv, f"exit code {completed.status}", stderr)
    if len(completed.stdout) > OUTPUT_LIMIT:
        raise CommandError(argv, f"printed more than {OUTPUT_LIMIT} bytes")
    return completed.stdout.decode(errors="surrogateescape")
