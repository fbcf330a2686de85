"""The wait for events: pipes simulate sources of events, and a socket a signal."""

import math
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
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
        self.refuses: Exception | None = None
        """The error that `open` raises."""
        self.breaks: Exception | None = None
        """The error that the check for events raises."""
        self.hides: Exception | None = None
        """The error that `polled` raises, once."""
        self.stays: Exception | None = None
        """The error that `close` raises."""
        self._pipe: tuple[int, int] | None = None

    def open(self) -> None:
        self.opened += 1
        if self.refuses:
            raise self.refuses
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[0], False)

    def close(self) -> None:
        for end in self._pipe or ():
            try:
                os.close(end)
            except OSError:
                continue
        self._pipe = None
        if self.stays:
            raise self.stays

    @property
    def pipe(self) -> tuple[int, int]:
        assert self._pipe is not None
        return self._pipe

    def polled(self) -> Mapping[int, int]:
        if self.hides:
            hides, self.hides = self.hides, None
            raise hides
        return {self.pipe[0]: select.POLLIN}

    def needs_pass(self) -> bool:
        if self.breaks:
            raise self.breaks
        try:
            return bool(os.read(self.pipe[0], 65536))
        except BlockingIOError:
            return False

    def event(self) -> None:
        os.write(self.pipe[1], b"x")


class Signalled:
    """An Interrupt that a test can raise."""

    def __init__(self) -> None:
        self.pending = False
        self._reading, self._writing = socket.socketpair()

    def fileno(self) -> int:
        return self._reading.fileno()

    def drain(self) -> None:
        self._reading.recv(100)

    def signal(self) -> None:
        self.pending = True
        self._writing.send(b"x")

    def close(self) -> None:
        self._reading.close()
        self._writing.close()


@pytest.fixture
def interrupt() -> Iterator[Signalled]:
    made = Signalled()
    yield made
    made.close()


@pytest.fixture
def pipes() -> Iterator[tuple[Piped, Piped]]:
    made = Piped("first"), Piped("second")
    yield made
    for each in made:
        each.close()


def opened(*sources: Source, spacing: float = 0.5) -> Wakeups:
    wakeups = Wakeups(sources, Settling(spacing=spacing))
    wakeups.open()
    return wakeups


def tally(wakeups: Wakeups, name: str) -> tuple[bool, int, int]:
    (found,) = (each for each in wakeups.tallies if each.name == name)
    return found.watching, found.wakeups, found.losses


def test_without_events_the_time_goes_by(pipes: tuple[Piped, Piped], interrupt: Signalled) -> None:
    wakeups = opened(*pipes)
    started = time.monotonic()
    assert wakeups.wait(0.2, interrupt) == ""
    assert time.monotonic() - started >= 0.2
    assert tally(wakeups, "first") == tally(wakeups, "second") == (True, 0, 0)


def test_without_sources_it_is_a_plain_wait(interrupt: Signalled) -> None:
    assert opened().wait(0.01, interrupt) == ""


def test_an_event_ends_the_wait_and_is_counted(pipes: tuple[Piped, Piped], interrupt: Signalled) -> None:
    wakeups = opened(*pipes)
    threading.Timer(0.1, pipes[1].event).start()
    assert wakeups.wait(60, interrupt) == "second"
    assert tally(wakeups, "first") == (True, 0, 0)
    assert tally(wakeups, "second") == (True, 1, 0)


def test_an_event_during_a_pass_causes_one_more_and_only_one(pipes: tuple[Piped, Piped], interrupt: Signalled) -> None:
    wakeups = opened(*pipes)
    for _ in range(5):
        pipes[0].event()
    assert wakeups.wait(60, interrupt) == "first"
    assert wakeups.wait(0.1, interrupt) == ""


def test_events_of_two_sources_are_one_pass(pipes: tuple[Piped, Piped], interrupt: Signalled) -> None:
    wakeups = opened(*pipes)
    pipes[1].event()
    pipes[0].event()
    assert wakeups.wait(60, interrupt) == "first"
    assert wakeups.wait(0.1, interrupt) == ""
    assert tally(wakeups, "first") == tally(wakeups, "second") == (True, 1, 0)


def test_passes_for_events_keep_their_distance_but_for_one(pipes: tuple[Piped, Piped], interrupt: Signalled) -> None:
    """After a silence, the second pass follows at once; each further one waits."""
    wakeups, starts = opened(*pipes, spacing=1.0), []
    for _ in range(4):
        pipes[0].event()
        assert wakeups.wait(60, interrupt) == "first"
        starts.append(time.monotonic())
    assert starts[1] - starts[0] < 0.9
    assert starts[2] - starts[0] >= 0.99
    assert starts[3] - starts[0] >= 1.99


def test_after_a_silence_the_next_pass_is_early_again(pipes: tuple[Piped, Piped], interrupt: Signalled) -> None:
    wakeups = opened(*pipes, spacing=0.3)
    for _ in range(3):
        pipes[0].event()
        assert wakeups.wait(60, interrupt) == "first"
    time.sleep(0.7)
    wakeups.settling, started = Settling(quiet=0, spacing=0.3), time.monotonic()
    pipes[0].event()
    assert wakeups.wait(60, interrupt) == "first"
    assert time.monotonic() - started < 0.3


def test_a_signal_ends_the_wait(pipes: tuple[Piped, Piped], interrupt: Signalled) -> None:
    wakeups = opened(*pipes)
    threading.Timer(0.1, interrupt.signal).start()
    assert wakeups.wait(60, interrupt) == ""


def test_a_signal_does_not_wait_for_events_to_settle(pipes: tuple[Piped, Piped], interrupt: Signalled) -> None:
    wakeups = Wakeups(pipes, Settling(quiet=600, longest=600))
    wakeups.open()
    pipes[0].event()
    threading.Timer(0.1, interrupt.signal).start()
    assert wakeups.wait(600, interrupt) == ""


def test_a_broken_source_is_counted_reopened_and_needs_a_pass(
    pipes: tuple[Piped, Piped], interrupt: Signalled, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    wakeups = opened(*pipes)
    pipes[0].breaks = RuntimeError("strange\nthing")
    pipes[0].event()
    threading.Timer(0.2, setattr, (pipes[0], "breaks", None)).start()
    assert wakeups.wait(60, interrupt) == "first"
    assert tally(wakeups, "first")[0]
    assert tally(wakeups, "first")[2] >= 1
    assert tally(wakeups, "second") == (True, 0, 0)
    assert pipes[1].opened == 1
    assert (
        "event source first lost, timed passes replace it until it works again: RuntimeError: strange thing"
        in caplog.messages
    )
    assert "event source first works again" in caplog.messages


def test_errors_while_a_source_is_polled_and_closed_are_a_loss(
    pipes: tuple[Piped, Piped], interrupt: Signalled, caplog: pytest.LogCaptureFixture
) -> None:
    wakeups = opened(*pipes)
    pipes[0].hides, pipes[0].stays = ValueError("I/O operation on closed file"), OSError("Bad file descriptor")
    assert wakeups.wait(60, interrupt) == "first"
    pipes[0].stays = None
    assert tally(wakeups, "first") == (True, 1, 1)
    assert "timed passes replace it until it works again: ValueError: I/O operation on closed file" in caplog.text
    assert "event source first was not closed properly: OSError: Bad file descriptor" in caplog.messages


@pytest.mark.parametrize("end", [0, 1], ids=["closed", "hung up"])
def test_a_closed_descriptor_is_a_loss(end: int, pipes: tuple[Piped, Piped], interrupt: Signalled) -> None:
    wakeups = opened(*pipes)
    os.close(pipes[0].pipe[end])
    assert wakeups.wait(60, interrupt) == "first"
    assert tally(wakeups, "first") == (True, 1, 1)
    pipes[0].event()
    assert wakeups.wait(60, interrupt) == "first"


def test_a_source_that_cannot_be_opened_is_reported_once_and_retried_ever_less_often(
    pipes: tuple[Piped, Piped], interrupt: Signalled, caplog: pytest.LogCaptureFixture
) -> None:
    pipes[0].refuses = FileNotFoundError(2, "no such thing")
    wakeups = opened(*pipes)
    assert wakeups.wait(2.5, interrupt) == ""
    # Tried at the start, at once, and after 1 s; the next attempt would be 2 s later.
    assert pipes[0].opened == 3
    assert tally(wakeups, "first") == (False, 0, 1)
    assert not wakeups.watches("first")
    assert wakeups.watches("second")
    assert sum("event source first lost" in message for message in caplog.messages) == 1
    pipes[1].event()
    assert wakeups.wait(60, interrupt) == "second", "the others go on"
    pipes[0].refuses = None
    assert wakeups.wait(60, interrupt) == "first", "it may have missed something"


def test_a_source_that_cannot_be_opened_for_days_does_not_end_the_service(interrupt: Signalled, clock: Clock) -> None:
    """Its attempts are a minute apart then: after a day, there are more than 1000."""
    source = Piped("first")
    source.refuses = OSError("not here")
    wakeups = opened(source)
    for _ in range(1100):
        clock.sleep(BACK_OFF)
        assert wakeups.wait(0, interrupt) == ""
    assert tally(wakeups, "first") == (False, 0, 1)
    source.refuses = None
    clock.sleep(BACK_OFF)
    assert wakeups.wait(0, interrupt) == "first"


def test_a_source_that_always_breaks_does_not_keep_the_loop_busy(
    pipes: tuple[Piped, Piped], interrupt: Signalled
) -> None:
    wakeups = opened(*pipes, spacing=0)
    pipes[0].breaks = OSError("broken")
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        wakeups.wait(deadline - time.monotonic(), interrupt)
    assert pipes[0].opened <= 4


@pytest.mark.processes
def test_a_storm_causes_a_pass_each_half_second_and_the_last_one_sees_the_end(
    host: Host, tmp_path: Path, interrupt: Signalled
) -> None:
    """10,000 real events in a second cause three passes, or four if there are pauses; a longer storm causes more."""
    directory = tmp_path / "host/dev"
    directory.mkdir()
    source = Directories("nodes", host, lambda: ("/dev",), lambda _, name: True)
    wakeups = opened(source)
    took: list[float] = []

    def storm() -> None:
        started = time.monotonic()
        for number in range(5000):
            (directory / f"nvidia{number % 7}").touch()
            (directory / f"nvidia{number % 7}").unlink()
            time.sleep(max(0.0, started + number / 5000 - time.monotonic()))
        (directory / "last").touch()
        took.append(time.monotonic() - started)

    thread = threading.Thread(target=storm)
    thread.start()
    seen: list[set[str]] = []
    while wakeups.wait(2, interrupt):
        seen.append({each.name for each in directory.iterdir()})
    thread.join()
    source.close()
    assert seen[-1] == {"last"}
    # Two at once, then one each half second, of which the last may come after the storm.
    assert len(seen) <= math.ceil(took[0] / 0.5) + 2, f"in {took[0]:.2f} s"
    assert tally(wakeups, "nodes") == (True, len(seen), 0)


def test_the_time_of_the_first_event_is_kept(pipes: tuple[Piped, Piped], interrupt: Signalled) -> None:
    """The time of the pass would be later, because a pass waits for events to settle."""
    wakeups = opened(*pipes)
    timer = threading.Timer(0.2, pipes[0].event)
    before = time.monotonic()
    timer.start()
    assert wakeups.wait(60, interrupt) == "first"
    assert before + 0.19 <= wakeups.first <= time.monotonic() - wakeups.settling.quiet
    timer.join()
