"""What a pass with nothing to do costs on larger hosts: calls of functions are counted, because times vary."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import linear_regression
from types import FrameType

import pytest

from agent.config.settings import Config
from agent.host.reconcile import Reconciler
from tests.fakes.gpu_host import MACHINE, VERSION, set_up
from tests.fakes.host import Host

SLOPE = 1.1
"""Of the logarithm of calls over the logarithm of size: 1 is linear growth, 2 a square."""
INSTANCES = 7
"""MIG instances of each GPU, the most that there can be."""


def gpus(host: Host, count: int) -> list[str]:
    """Give the host so many GPUs, each with all MIG instances."""
    for index in range(2, count):
        host.gpu(f"0000:{index + 1:02x}:00.0", index)
    places = [
        f"gpu{gpu}/mig/gi{instance}/{part}"
        for gpu in range(count)
        for instance in range(1, INSTANCES + 1)
        for part in ("access", "ci0/access")
    ]
    for minor, place in enumerate(places, 100):
        host.capability(place, minor)
    return [MACHINE]


def machines(host: Host, count: int) -> list[str]:
    names = [MACHINE, *(f"{MACHINE}-{number}" for number in range(1, count))]
    for name in names[1:]:
        host.make_directory(f"/var/lib/machines/{name}")
        host.bus.unit(f"systemd-nspawn@{name}.service", "inactive")
    return names


def libraries(host: Host, count: int) -> list[str]:
    for number in range(count):
        path = f"/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-more{number}.so.{VERSION}"
        host.file(path, b"\x7fELF", size=4096)
    return [MACHINE]


def calls_of_a_pass(host: Host, names: list[str]) -> int:
    """Return how many functions the main thread calls in a pass with nothing to do."""
    config = Config.validated({"machines": {name: {} for name in names}})
    agent = Reconciler(config, host, host)
    for _ in range(2):
        agent.reconcile()
    count = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        outcome = agent.reconcile()
    finally:
        sys.setprofile(None)
    assert (outcome.actions, outcome.failures) == ((), ())
    assert {len(each.conditions) > 1 for each in outcome.machines} == {True}
    return count


@pytest.mark.parametrize(
    ("enlarge", "sizes"),
    [(gpus, (4, 12)), (machines, (4, 12)), (libraries, (50, 150))],
    ids=["GPUs", "machines", "libraries"],
)
def test_a_pass_grows_linearly_at_most(
    tmp_path: Path, enlarge: Callable[[Host, int], list[str]], sizes: tuple[int, ...]
) -> None:
    found = []
    for size in sizes:
        tree = tmp_path / str(size)
        tree.mkdir()
        host = set_up(Host(tree))
        found.append(calls_of_a_pass(host, enlarge(host, size)))
    line = linear_regression([math.log(each) for each in sizes], [math.log(each) for each in found])
    assert line.slope <= SLOPE, dict(zip(sizes, found, strict=True))
