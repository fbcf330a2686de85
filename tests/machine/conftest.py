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


RARELY = (0, 1, 2, 4, 8, 16, 26)
"""The minutes at which something that keeps failing is tried: each wait is as long as the fault has lasted, and no
longer than ten minutes."""


@pytest.fixture
def becomes_rare(clock: Clock) -> Callable[..., None]:
    """Return a check that what a function tries, which returns true if it has tried, becomes rare."""

    def check(tries: Callable[[], object], until: int = RARELY[-1] + 1) -> None:
        now = 0
        # Nothing happens in the other minutes either: they are left out because each is a run.
        for minute in sorted({*RARELY, *(each - 1 for each in RARELY[1:]), RARELY[-1] + 1}):
            if minute <= until:
                clock.sleep((minute - now) * 60.0)
                now = minute
                assert bool(tries()) is (minute in RARELY), minute

    return check
