"""This computer as the host under test, for tests with real GPUs."""

from collections.abc import Sequence
from pathlib import Path

from integration.bed.process import checked, complete
from integration.bed.vm.guest import Completed


class ThisComputer:
    """Runs commands here."""

    def run(self, argv: Sequence[str], timeout: float = 60, check: bool = True, stdin: str = "") -> Completed:
        """Run `argv`. Raises CommandError if it takes too long or, with `check`, if its status is not 0."""
        result = complete(argv, stdin=stdin, timeout=timeout)
        if check:
            checked(result)
        return Completed(result.returncode, result.stdout, result.stderr)

    def read(self, path: str) -> bytes:
        """Return a file's content. Raises OSError."""
        return Path(path).read_bytes()
