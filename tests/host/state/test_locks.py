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
from tests.fakes.clock import Clock
from tests.fakes.gpu_host import reconciler
from tests.fakes.host import Host

Begin = Callable[[float], None]


@pytest.fixture
def another_pass(gpu_host: Host, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Return a function that lets another process hold the pass lock for so many seconds."""
    monkeypatch.setattr(time, "monotonic", lambda: clock.passed)
    gpu_host.make_directory(os.path.dirname(PASS_LOCK))
    descriptor = gpu_host.open_lock(PASS_LOCK)

    def begin(seconds: float) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

        def meanwhile() -> None:
            if clock.passed >= seconds:
                fcntl.flock(descriptor, fcntl.LOCK_UN)

        clock.meanwhile = meanwhile

    yield begin
    os.close(descriptor)


def test_a_long_pass_of_the_service_fails_no_other_pass(gpu_host: Host, clock: Clock, another_pass: Begin) -> None:
    """`apply` gave up after 10 seconds, although it waits minutes for machines."""
    another_pass(59)
    assert reconciler(gpu_host).reconcile().failures == ()
    assert clock.passed >= 59


def test_waiting_is_said_once_and_gives_signs_of_life(gpu_host: Host, clock: Clock, another_pass: Begin) -> None:
    """The service's watchdog must not expire while the service waits."""
    another_pass(30)
    told = list[tuple[float, str]]()
    with pass_lock(gpu_host, lambda sentence: told.append((clock.passed, sentence))):
        pass
    sentences = [each for _, each in told if each]
    assert sentences == ["waiting up to 60 s: another pass of unbounded-agent is still running"]
    times = [seconds for seconds, _ in told]
    assert 1 < times[0] < 3, "a short pass is not worth a message"
    assert max(after - before for before, after in pairwise(times)) < PROGRESS_INTERVAL
    assert 30 - times[-1] < PROGRESS_INTERVAL


def test_a_pass_that_hangs_is_named_with_a_command(gpu_host: Host, clock: Clock, another_pass: Begin) -> None:
    another_pass(3600)
    with (
        pytest.raises(AgentError, match=r"^another pass of unbounded-agent is still running") as raised,
        pass_lock(gpu_host, lambda _: None),
    ):
        pass
    assert raised.value.hint == "see who holds the lock: `fuser /run/unbounded-agent/pass.lock`"
    assert PASS_WAIT <= clock.passed < PASS_WAIT + 1
