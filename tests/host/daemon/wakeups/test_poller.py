"""The wait for events: pipes simulate sources of events, and a socket a signal."""

import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from agent.host.daemon.wakeups import BACK_OFF, Directories, Settling, Source, Wakeups
from tests.fakes.clock import Clock
from tests.fakes.host import Host


class Piped:
    """A Source that needs a pass once bytes arrive through its pipe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.opened = 0
        self.errors: dict[str, Exception] = {}
        """The errors that `open`, `needs_pass`, `polled` (once) and `close` raise."""
        self._pipe: tuple[int, int] | None = None

    def _fail(self, method: str) -> None:
        if method in self.errors:
            raise self.errors[method]

    def open(self) -> None:
        self.opened += 1
        self._fail("open")
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[0], False)

    def close(self) -> None:
        for end in self._pipe or ():
            try:
                os.close(end)
            except OSError:
                continue
        self._pipe = None
        self._fail("close")

    @property
    def pipe(self) -> tuple[int, int]:
        assert self._pipe is not None
        return self._pipe

    def polled(self) -> Mapping[int, int]:
        if hidden := self.errors.pop("polled", None):
            raise hidden
        return {self.pipe[0]: select.POLLIN}

    def needs_pass(self) -> bool:
        self._fail("needs_pass")
        try:
            return bool(os.read(self.pipe[0], 65536))
        except BlockingIOError:
            return False

    def event(self) -> None:
        os.write(self.pipe[1], b"x")


Wait = Callable[[Wakeups, float], str]


@pytest.fixture
def signals() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a socket pair. What is sent on the second one is a signal."""
    pair = socket.socketpair()
    yield pair
    for each in pair:
        each.close()


@pytest.fixture
def wait(signals: tuple[socket.socket, socket.socket]) -> Wait:
    return lambda wakeups, seconds: wakeups.wait(seconds, signals[0].fileno())


@pytest.fixture
def pipes() -> Iterator[tuple[Piped, Piped]]:
    made = Piped("first"), Piped("second")
    yield made
    for each in made:
        each.errors = {}
        each.close()


def opened(*sources: Source, settling: Settling | None = None) -> Wakeups:
    wakeups = Wakeups(sources, settling)
    wakeups.open()
    return wakeups


def tally(wakeups: Wakeups, name: str) -> tuple[bool, int, int]:
    found = wakeups.tallies[name]
    return found.watching, found.wakeups, found.losses


def test_an_event_ends_the_wait_and_is_counted_and_dated(pipes: tuple[Piped, Piped], wait: Wait) -> None:
    """The time of the pass would be later, because a pass waits for events to settle."""
    wakeups, before = opened(*pipes), time.monotonic()
    timer = threading.Timer(0.1, pipes[1].event)
    timer.start()
    assert wait(wakeups, 60) == "second"
    assert before + 0.09 <= wakeups.first <= time.monotonic() - wakeups.settling.quiet
    assert (tally(wakeups, "first"), tally(wakeups, "second")) == ((True, 0, 0), (True, 1, 0))
    timer.join()


def test_events_during_a_pass_cause_one_more_and_only_one(pipes: tuple[Piped, Piped], wait: Wait) -> None:
    wakeups = opened(*pipes)
    for each in (1, 0, 0, 1, 0):
        pipes[each].event()
    assert [wait(wakeups, 60), wait(wakeups, 0.05)] == ["first", ""]
    assert tally(wakeups, "first") == tally(wakeups, "second") == (True, 1, 0)


def test_passes_for_events_keep_their_distance_but_for_one(pipes: tuple[Piped, Piped], wait: Wait) -> None:
    """After a silence, the second pass follows at once; each further one waits."""
    wakeups, starts = opened(*pipes, settling=Settling(spacing=0.4)), []
    for silence in (0, 0, 0, 0.9, 0):
        time.sleep(silence)
        pipes[0].event()
        assert wait(wakeups, 60) == "first"
        starts.append(time.monotonic())
    assert starts[1] - starts[0] < 0.35
    assert starts[2] - starts[0] >= 0.39
    assert starts[4] - starts[3] < 0.35


@pytest.mark.parametrize("event", [False, True])
def test_a_signal_ends_the_wait_even_while_events_settle(
    pipes: tuple[Piped, Piped], wait: Wait, signals: tuple[socket.socket, socket.socket], event: bool
) -> None:
    wakeups = opened(*pipes, settling=Settling(quiet=600, longest=600))
    if event:
        pipes[0].event()
    threading.Timer(0.05, signals[1].send, (b"x",)).start()
    assert wait(wakeups, 600) == ""


def test_a_broken_source_is_counted_reopened_and_needs_a_pass(
    pipes: tuple[Piped, Piped], wait: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    wakeups = opened(*pipes)
    pipes[0].errors["needs_pass"] = RuntimeError("strange\nthing")
    pipes[0].event()
    threading.Timer(0.1, pipes[0].errors.clear).start()
    assert wait(wakeups, 60) == "first"
    assert tally(wakeups, "first")[0]
    assert tally(wakeups, "first")[2] >= 1
    assert (tally(wakeups, "second"), pipes[1].opened) == ((True, 0, 0), 1)
    lost = "event source first lost, timed passes replace it until it works again: RuntimeError: strange thing"
    assert {lost, "event source first works again"} <= set(caplog.messages)


@pytest.mark.parametrize("end", [0, 1, None], ids=["closed", "hung up", "errors"])
def test_a_closed_descriptor_is_a_loss(
    end: int | None, pipes: tuple[Piped, Piped], wait: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    wakeups = opened(*pipes)
    if end is None:
        pipes[0].errors = {"polled": ValueError("I/O operation on closed file"), "close": OSError("Bad descriptor")}
    else:
        os.close(pipes[0].pipe[end])
    assert wait(wakeups, 60) == "first"
    assert tally(wakeups, "first") == (True, 1, 1)
    assert "timed passes replace it until it works again: " in caplog.text
    pipes[0].errors.clear()
    pipes[0].event()
    assert wait(wakeups, 60) == "first"


def test_a_source_that_cannot_be_opened_is_reported_once_and_retried_ever_less_often(
    wait: Wait, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """After a day, there are more than 1000 attempts, a minute apart."""
    first, second = Piped("first"), Piped("second")
    first.errors["open"] = FileNotFoundError(2, "no such thing")
    wakeups, attempts = opened(first, second), []
    for after in (0, 0.9, 0.2, 1.9, 0.2, *[BACK_OFF] * 1100):
        clock.sleep(after)
        assert wait(wakeups, 0) == ""
        attempts.append(first.opened)
    # At the start, at once, after 1 s, and after 2 s more.
    assert attempts[:5] == [2, 2, 3, 3, 4]
    assert attempts[-1] > 1000
    assert (tally(wakeups, "first"), tally(wakeups, "second")) == ((False, 0, 1), (True, 0, 0))
    assert sum("event source first lost" in message for message in caplog.messages) == 1
    second.event()
    assert wait(wakeups, 60) == "second", "the others go on"
    first.errors = {}
    clock.sleep(BACK_OFF)
    assert wait(wakeups, 0) == "first", "it may have missed something"
    first.close()
    second.close()


def test_a_source_that_always_breaks_does_not_keep_the_loop_busy(wait: Wait, clock: Clock) -> None:
    source = Piped("first")
    wakeups = opened(source, settling=Settling(spacing=0))
    source.errors["needs_pass"] = OSError("broken")
    for _ in range(100):
        wait(wakeups, 0)
        clock.sleep(0.025)
    assert source.opened <= 4
    source.close()


@pytest.mark.processes
def test_a_storm_causes_a_pass_each_half_second_and_the_last_one_sees_the_end(
    host: Host, tmp_path: Path, wait: Wait
) -> None:
    """2,000 real events in two thirds of a second cause few passes; a longer storm causes more."""
    directory = tmp_path / "host/dev"
    directory.mkdir()
    source = Directories("nodes", host, lambda: ("/dev",), lambda _, name: True)
    wakeups = opened(source)
    took: list[float] = []

    def storm() -> None:
        started = time.monotonic()
        for number in range(1000):
            (directory / f"nvidia{number % 7}").touch()
            (directory / f"nvidia{number % 7}").unlink()
            time.sleep(max(0.0, started + number / 1500 - time.monotonic()))
        (directory / "last").touch()
        took.append(time.monotonic() - started)

    thread = threading.Thread(target=storm)
    thread.start()
    seen: list[set[str]] = []
    while wait(wakeups, 1):
        seen.append({each.name for each in directory.iterdir()})
    thread.join()
    source.close()
    assert seen[-1] == {"last"}
    # Two at once, then one each half second, of which the last may come after the storm.
    assert len(seen) <= math.ceil(took[0] / 0.5) + 2, f"in {took[0]:.2f} s"
    assert tally(wakeups, "nodes") == (True, len(seen), 0)
