"""Fixtures of the machine half's tests."""

from pathlib import Path

import pytest

from tests.fakes.machine import Machine, gpu_machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with two GPUs, before its first run."""
    return gpu_machine(tmp_path / "machine")
