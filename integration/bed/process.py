"""Run a build step's command; its output is shown only when it fails."""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

Argument = str | Path


LIMIT = 1800.0
"""Seconds: no build takes that long, and what hangs must not hang a test run."""


class BedError(Exception):
    """Something in the bed failed; the text is for whoever started it."""


class CommandError(BedError):
    """A command of the bed failed; the text holds the command line and the end of its output."""


def run(
    argv: Sequence[Argument],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout: float = LIMIT,
) -> str:
    """Standard output of `argv`, without the last newline; `env` is added to this process's own.

    Raises CommandError.
    """
    line = shlex.join(str(word) for word in argv)
    try:
        result = subprocess.run(
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
        raise CommandError(f"{line}\nstill runs after {timeout:.0f} s") from error
    if result.returncode:
        output = (result.stdout + result.stderr).strip().splitlines()
        raise CommandError(f"{line}\nexit code {result.returncode}:\n" + "\n".join(output[-25:]))
    return result.stdout.rstrip("\n")
