"""The host half's backend of `agent.system.commands`: the sh package."""

import io

import sh

from agent.system.commands import ENVIRONMENT, Completed, TimeLimitError
from agent.system.deadlines import bounded

KILL_MARGIN = 3.0
"""Seconds after the time limit in which a killed program must be gone."""


def host_runner(argv: tuple[str, ...], timeout: float) -> Completed:
    """A Runner. A program that SIGKILL does not end is left behind, and not started again before it is gone."""
    # Threads of `sh` are daemon threads as the one that it is called in: none holds up the end of this process.
    return bounded(" ".join(argv), lambda: _run(argv, timeout), timeout + KILL_MARGIN)


def _run(argv: tuple[str, ...], timeout: float) -> Completed:
    """`sh` kills the program's whole session at the time limit."""
    try:
        command = sh.Command(argv[0], search_paths=ENVIRONMENT["PATH"].split(":"))
    except sh.CommandNotFound as error:
        raise FileNotFoundError(argv[0]) from error
    stdout, stderr = io.BytesIO(), io.BytesIO()
    try:
        # _tty_out: sh gives programs a terminal by default, on which some of them format or page their output.
        finished = command(
            *argv[1:],
            _in=io.BytesIO(),
            _out=stdout,
            _err=stderr,
            _env=dict(ENVIRONMENT),
            _cwd="/",
            _timeout=timeout,
            _tty_out=False,
            _ok_code=list(range(256)),
            _return_cmd=True,
        )
        status = int(finished.exit_code)
    except sh.TimeoutException as error:
        raise TimeLimitError from error
    except sh.SignalException as error:
        status = -abs(int(error.exit_code))
    return Completed(status, stdout.getvalue(), stderr.getvalue())
