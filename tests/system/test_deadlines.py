"""Calls that hang are abandoned and not repeated. A thread that waits for an event simulates such a call."""

import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from agent.model.conditions import Status
from agent.model.errors import CommandError, UnkillableError
from agent.system.copy import STEP, Copies
from agent.system.deadlines import SHORTEST, bounded, call_device, read_device_texts, stuck
from agent.system.files import System
from agent.system.process import Completed, host_runner, run_checked
from tests.fakes.gpu_host import reconciler
from tests.fakes.host import Host
from tests.fakes.waiting import wait_for


class Hanging:
    """A call that does not return until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        self.released.wait(60)
        return "late"


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    made.released.set()


@pytest.fixture
def name() -> str:
    """A name for a call that no other test makes."""
    return f"test {uuid4()}"


class Files:
    """A Reader of files whose content is their path; one may be missing, hang or be slow."""

    def __init__(self, root: str, hanging: Hanging) -> None:
        self.root, self.hanging = root, hanging
        self.hangs, self.slow = "", 0.0
        self.threads: set[int] = set()
        self.reads: list[str] = []

    def read_text(self, path: str) -> str:
        self.threads.add(threading.get_ident())
        self.reads.append(path)
        time.sleep(self.slow)
        if path == self.hangs:
            return self.hanging()
        if path == "/missing":
            raise FileNotFoundError(2, "no such file", path)
        return path


@pytest.fixture
def files(hanging: Hanging, name: str) -> Files:
    return Files(f"/{name}", hanging)


def test_one_worker_reads_many_files_however_long_they_take_together(files: Files) -> None:
    # Together longer than the limit; each is far below it, also on a busy machine.
    files.slow, paths = 0.2, ["/missing", *(f"/{number}" for number in range(11))]
    missing, *texts = read_device_texts(files, paths, 2.0)
    assert isinstance(missing, FileNotFoundError)
    assert texts == paths[1:]
    assert len(files.threads) == 1


@pytest.mark.parametrize("hangs", ["/0", "/4"])
def test_of_many_files_only_the_one_that_hangs_is_not_read(files: Files, hangs: str) -> None:
    files.hangs, paths = hangs, [f"/{number}" for number in range(5)]
    for _ in range(2):
        texts = dict(zip(paths, read_device_texts(files, paths, 1.5), strict=True))
        assert isinstance(texts[hangs], TimeoutError)
        assert [path for path in paths if texts[path] != path] == [hangs]
        assert f"{files.root}{hangs}" in stuck()
    assert files.hanging.calls == 1
    files.hanging.released.set()
    wait_for(lambda: f"{files.root}{hangs}" not in stuck())
    assert list(read_device_texts(files, paths))[int(hangs[1:])] == "late"


def test_a_caller_that_stops_at_an_error_leaves_one_worker_behind(files: Files) -> None:
    files.hangs, paths = "/1", [f"/{number}" for number in range(5)]
    texts, started = read_device_texts(files, paths, 0.2), time.monotonic()
    assert next(texts) == "/0"
    assert isinstance(next(texts), TimeoutError)
    assert time.monotonic() - started < 1.6, "only its own time"
    del texts
    files.hanging.released.set()
    wait_for(lambda: f"{files.root}/1" not in stuck())
    assert len(files.threads) == 1
    assert files.reads == ["/0", "/1"], "the worker does not go on with what nobody waits for"


def test_a_hanging_call_is_abandoned_counted_and_not_repeated(name: str, hanging: Hanging) -> None:
    assert bounded(name, int, 60) == 0
    with pytest.raises(FileNotFoundError):
        bounded(name, lambda: os.stat("/there/is/no/such/file"), 60)
    assert name not in stuck()
    before = threading.active_count()
    with pytest.raises(TimeoutError, match="no answer in time"):
        bounded(name, hanging, 0.05)
    assert name in stuck()
    for _ in range(10):
        with pytest.raises(TimeoutError, match="an earlier attempt still hangs"):
            bounded(name, hanging, 60)
    assert (hanging.calls, threading.active_count()) == (1, before), "in the thread of the call before it"
    assert bounded(f"{name} other", lambda: "others go on", 60) == "others go on"
    assert bounded(f"{name} other", lambda: "and on", 60) == "and on"
    assert threading.active_count() <= before + 1
    hanging.released.set()
    wait_for(lambda: name not in stuck())
    assert bounded(name, hanging, 60) == "late", "it is tried again"


def test_only_the_main_thread_wakes_up_while_it_waits(name: str) -> None:
    """For signals, which other threads do not handle: the watches of the API server wait for minutes."""
    wakeups = []

    def wait() -> None:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        bounded(name, lambda: time.sleep(3.5), 60)
        wakeups.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join()
    assert wakeups[0] <= 3, "it starts a worker, and learns of the end"


def test_many_hanging_calls_take_no_longer_than_two(name: str, hanging: Hanging) -> None:
    """With a hundred files of one broken driver, a pass ends long before the watchdog fires."""
    limits = []
    for number in range(50):
        with pytest.raises(TimeoutError) as caught:
            call_device(f"{name} {number}", hanging, 2)
        message = str(caught.value.strerror)
        limits.append(0 if message == "no answer in time" else int(re.sub(r"no answer within (\d+) s", r"\1", message)))
    # The limits, not the time that passed: a busy machine adds to that. SHORTEST: the message omits short limits.
    assert limits[0] == 2
    assert sum(limits) + len(limits) * SHORTEST < 6, "less than the full limits of three calls"
    assert call_device(name, lambda: "others go on", 2) == "others go on"


def test_a_driver_that_does_not_answer_withdraws_nothing(gpu_host: Host, hanging: Hanging) -> None:
    place = "/proc/driver/nvidia/gpus/0000:01:00.0/information"
    read, passes = gpu_host.read_text, reconciler(gpu_host)
    before = passes.run_pass().machines[0]
    gpu_host.read_text = lambda path: hanging() if path == place else read(path)  # type: ignore[method-assign]
    outcome = passes.run_pass()
    (machine,) = outcome.machines
    assert machine.conditions[-1].status is not Status.TRUE
    assert any(place in each.message and each.status is Status.UNKNOWN for each in machine.conditions)
    assert outcome.actions == ()
    started = time.monotonic()
    passes.run_pass()
    assert time.monotonic() - started < 4, "the deadline is not waited for again"
    assert hanging.calls == 1
    gpu_host.read_text = read  # type: ignore[method-assign]
    hanging.released.set()
    wait_for(lambda: not any(each.endswith(place) for each in stuck()))
    found = {each.type: each.status for each in passes.run_pass().machines[0].conditions}
    assert found == {each.type: each.status for each in before.conditions}


@pytest.mark.processes
def test_a_program_ends_at_its_time_limit() -> None:
    with pytest.raises(CommandError, match="stopped after its time limit of 0 s"):
        run_checked(host_runner, ("sleep", "1000"), 0.2)
    assert not any("sleep" in each for each in stuck())


def test_a_program_that_cannot_be_killed_is_reported_to_hang(name: str, hanging: Hanging) -> None:
    """This is simulated: no test can have a program in D state."""

    def runner(argv: tuple[str, ...], timeout: float) -> Completed:
        return bounded(name, lambda: Completed(0, hanging().encode(), b""), timeout)

    for why in (r"no answer in time \(it cannot even be killed", "an earlier attempt still hangs"):
        with pytest.raises(CommandError, match=why):
            run_checked(runner, ("ldconfig", "-p"), 0.05)


@pytest.mark.processes
def test_a_program_that_cannot_be_killed_is_named_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may wait for its end. That it cannot be killed is simulated: killpg(2) does nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        with pytest.raises(UnkillableError, match="it cannot even be killed") as caught:
            run_checked(host_runner, ("sleep", "1003"), 0.1)
    assert Path(f"/proc/{caught.value.pid}/comm").read_text() == "sleep\n"
    os.killpg(caught.value.pid, signal.SIGKILL)


def test_each_staged_file_is_progress(gpu_host: Host) -> None:
    progress: list[str] = []
    passes = reconciler(gpu_host)
    passes.progress = progress.append
    passes.run_pass()
    begin = next(index for index, text in enumerate(progress) if text.startswith("stage ")) + 1
    files = [text == "" for text in progress[begin:]].index(False)
    assert files > 20, "one for each file of the driver, none of them with a text"


def test_parts_of_a_large_file_are_progress(tmp_path: Path) -> None:
    system = System(host_runner, str(tmp_path))
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2 * STEP + 5)
    progress: list[str] = []
    with (tmp_path / "large").open("rb") as reading, Copies(lambda: progress.append("part")) as copies:
        system.copy(reading, "/copy", 0o644, copies)
        parts = len(progress)
    assert (tmp_path / "copy").stat().st_size == 2 * STEP + 5
    # If the file system shares extents, the copy is one short step.
    assert parts in (0, 2)
    assert len(progress) == parts + 1, "the disk has written the copy"
