"""A runner for code that must start no process."""

from agent.system.process import Completed


def no_process(argv: tuple[str, ...], timeout: float) -> Completed:
    raise AssertionError(f"unexpected process {argv}")
