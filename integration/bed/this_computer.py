"""This computer as the host under test, for tests with real GPUs."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from integration.bed.process import CommandError
from integration.bed.vm.guest import Completed


class ThisComputer:
    """Runs commands here."""

    def run(self, argv: Sequence[str], timeout: float = 60, check: bool = True, stdin: str = "") -> Completed:
        """Run `argv`. Raises CommandError if it takes too long or, with `check`, if its status is not 0."""
        line, environment = shlex.join(argv), {**os.environ, "LC_ALL": "C.UTF-8"}
        try:
            result = subprocess.run(
                argv, input=stdin, text=True, errors="replace", capture_output=True, timeout=timeout, env=environment
            )
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"{line}: not done in {timeout:.0f} s") from error
        if check and result.returncode:
            raise CommandError(f"{line}: status {result.returncode}\n{result.stdout[-2000:]}{result.stderr[-4000:]}")
        return Completed(result.returncode, result.stdout, result.stderr)

    def read(self, path: str) -> bytes:
        """Return a file's content. Raises OSError."""
        return Path(path).read_bytes()
