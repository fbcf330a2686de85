"""Errors say first what failed and why."""

import pytest

from agent.model.errors import CommandError, ExitCodeError

LONG = ("/usr/bin/nvidia-ctk", "cdi", "generate", *(f"--option={'x' * 20}{number}" for number in range(20)))


def test_a_command_comes_before_the_reason() -> None:
    assert str(ExitCodeError(("ldconfig", "-p"), 1, "no\n cache")) == "ldconfig -p: exit code 1: no cache"


@pytest.mark.parametrize("stderr", ["", "failed to initialize NVML: Driver/library version mismatch"])
def test_a_long_command_comes_last(stderr: str) -> None:
    """`status` cut off the reason: the command of nvidia-ctk alone has 430 characters."""
    message = str(CommandError(LONG, "killed by signal 11", stderr))
    why = f"killed by signal 11: {stderr}" if stderr else "killed by signal 11"
    assert message == f"/usr/bin/nvidia-ctk cdi generate ...: {why}; the whole command: {' '.join(LONG)}"


def test_one_long_argument_does_not_come_first_either() -> None:
    message = str(CommandError(("kubectl", "patch", "x" * 10_000), "stopped after its time limit of 10 s"))
    assert "stopped after its time limit" in message[:150]
