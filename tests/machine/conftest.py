"""Fixtures of the machine half's tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.clock import Clock
from tests.fakes.kubelet import Kubelet
from tests.fakes.machine import Machine, gpu_machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with two GPUs, before its first run."""
    return gpu_machine(tmp_path / "machine")


@pytest.fixture
def kubelet(machine: Machine) -> Iterator[Kubelet]:
    """The kubelet of that machine, which does not listen yet."""
    with ExitStack() as stack:
        yield Kubelet(machine, stack)


@pytest.fixture
def later(clock: Clock) -> Callable[[float], None]:
    """Return a function by which seconds pass."""
    return clock.sleep
