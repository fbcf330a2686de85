"""Run a build step's command; its output is shown only when it fails."""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

Argument = str | Path


class CommandError(Exception):
    """A command of the bed failed; the text holds the command line and the end of its output."""


def run(
    argv: Sequence[Argument], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, stdin: str | None = None
) -> str:
    """Standard output of `argv`, without the last newline; `env` is added to this process's own."""
    result = subprocess.run(
        argv,
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
        input=stdin if stdin is not None else "",
        text=True,
        errors="replace",
        capture_output=True,
    )
    if result.returncode:
        output = (result.stdout + result.stderr).strip().splitlines()
        line = shlex.join(str(word) for word in argv)
        raise CommandError(f"{line}\nexit code {result.returncode}:\n" + "\n".join(output[-25:]))
    return result.stdout.rstrip("\n")
