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
    return gpu_machine(tmp_path / "machine")


@pytest.fixture
def kubelet(machine: Machine) -> Iterator[Kubelet]:
    with ExitStack() as stack:
        yield Kubelet(machine, stack)


@pytest.fixture
def later(clock: Clock) -> Callable[[float], None]:
    return clock.sleep
