"""Waiting for another process's pass: on a clock that only sleeping moves, and none of the tests waits."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from agent.host.daemon.loop import PROGRESS_INTERVAL
from agent.host.state.locks import PASS_WAIT, pass_lock
from agent.model.errors import AgentError
from agent.model.paths import PASS_LOCK
from tests.fakes.gpu_host import reconciler
from tests.fakes.host import Host


class AnotherPass:
    """Holds the pass lock as another process does, and ends after `seconds` of the simulated clock."""

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now = self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.told: list[tuple[float, str]] = []
        host.make_directory(os.path.dirname(PASS_LOCK))
        self.descriptor = host.open_lock(PASS_LOCK)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.end:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def progress(self, sentence: str) -> None:
        self.told.append((self.now - self.begin, sentence))


Begin = Callable[[float], AnotherPass]


@pytest.fixture
def another_pass(gpu_host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    begun: list[AnotherPass] = []

    def begin(seconds: float) -> AnotherPass:
        begun.append(AnotherPass(gpu_host, monkeypatch, seconds))
        return begun[-1]

    yield begin
    for each in begun:
        os.close(each.descriptor)


def test_a_long_pass_of_the_service_fails_no_other_pass(gpu_host: Host, another_pass: Begin) -> None:
    """`apply` gave up after 10 seconds, although it waits minutes for machines."""
    other = another_pass(59)
    agent = reconciler(gpu_host)
    agent.progress = other.progress
    assert agent.reconcile().failures == ()
    assert other.now >= other.end


def test_waiting_is_said_once_and_gives_signs_of_life(gpu_host: Host, another_pass: Begin) -> None:
    """The service's watchdog must not expire while the service waits."""
    other = another_pass(30)
    with pass_lock(gpu_host, other.progress):
        pass
    sentences = [each for _, each in other.told if each]
    assert sentences == ["waiting up to 60 s: another pass of unbounded-agent is still running"]
    times = [seconds for seconds, _ in other.told]
    assert 1 < times[0] < 3, "a short pass is not worth a message"
    assert max(after - before for before, after in pairwise(times)) < PROGRESS_INTERVAL
    assert 30 - times[-1] < PROGRESS_INTERVAL


def test_a_pass_that_hangs_is_named_with_a_command(gpu_host: Host, another_pass: Begin) -> None:
    other = another_pass(3600)
    with (
        pytest.raises(AgentError, match=r"^another pass of unbounded-agent is still running") as raised,
        pass_lock(gpu_host, other.progress),
    ):
        pass
    assert raised.value.hint == "see who holds the lock: `fuser /run/unbounded-agent/pass.lock`"
    assert PASS_WAIT <= other.now - other.begin < PASS_WAIT + 1
