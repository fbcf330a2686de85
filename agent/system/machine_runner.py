"""The machine half's backend of `agent.system.commands`: the standard library alone, which starts fastest."""

import subprocess

from agent.system.commands import ENVIRONMENT, Completed, TimeLimitError


def machine_runner(argv: tuple[str, ...], timeout: float) -> Completed:
    """A Runner. Standard output and error are taken whole; the program is killed at the time limit."""
    try:
        finished = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, env=dict(ENVIRONMENT), cwd="/"
        )
    except subprocess.TimeoutExpired as error:
        raise TimeLimitError from error
    return Completed(finished.returncode, finished.stdout, finished.stderr)
