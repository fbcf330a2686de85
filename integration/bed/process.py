"""Run a command on this computer; its output is shown only if it fails."""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from integration.bed.architecture import CHOSEN

Argument = str | Path


LIMIT = 7200.0 if CHOSEN.is_foreign else 1800.0
"""Seconds. No build takes this long, and a command that hangs must not block a test run."""


class BedError(Exception):
    """Something in the bed failed; the text is for the person who started it."""


class CommandError(BedError):
    """A command failed; the text has the command line and the end of its output."""


def run(
    argv: Sequence[Argument],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout: float = LIMIT,
) -> str:
    """Run `argv` and return its standard output without the last newline; `env` is added to this process's variables.

    Raises CommandError.
    """
    return checked(complete(argv, cwd=cwd, env=env, stdin=stdin, timeout=timeout)).stdout.rstrip("\n")


def complete(
    argv: Sequence[Argument],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout: float = LIMIT,
) -> subprocess.CompletedProcess[str]:
    """Run `argv`, and return the result whatever its status. Raises CommandError if it takes too long."""
    try:
        return subprocess.run(
            argv,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
            input=stdin,
            text=True,
            errors="replace",
            capture_output=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{_line(argv)}\nstill runs after {timeout:.0f} s") from error


def checked(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Return the result. Raises CommandError if the command failed."""
    if result.returncode:
        output = (result.stdout + result.stderr).strip().splitlines()
        raise CommandError(f"{_line(result.args)}\nexit code {result.returncode}:\n" + "\n".join(output[-25:]))
    return result


def _line(argv: Sequence[Argument]) -> str:
    return shlex.join(str(word) for word in argv)
