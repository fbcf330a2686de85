"""Runs calls that may never return: a thread in D state cannot even be killed.

A call that misses its deadline is abandoned, and not repeated while it hangs.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")

DEVICE_CALL = 5.0
"""Seconds for a driver's answer. NVIDIA's driver holds a lock for some seconds when a GPU is first used."""
SOURCE_READ = 2.0
"""Seconds to observe the source of a mount, which may be on a remote server."""
SHORTEST = 0.02
"""Seconds that every call gets at least, however many others hang. A healthy driver needs a thousandth of that time."""
SIGNAL_INTERVAL = 1.0
"""Seconds after which a waiting main thread wakes up, in order to handle signals. In Python, only the main thread
handles them. But while the main thread starts a worker, its signals are blocked (pthread_create). If a signal comes
then, the kernel gives it to another thread and wakes only that thread, so the main thread would go on waiting."""


class _Call(Generic[T]):
    def __init__(self, call: Callable[[], T], *, is_source: bool) -> None:
        self.call, self.is_source = call, is_source
        self.result: T | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()


_idle: list[SimpleQueue[_Call[Any]]] = []
"""The queues of workers that wait for a call. A worker is a thread that runs one call after another, because starting a
thread takes longer than most calls. It is a daemon thread, so the process can exit while a call hangs."""


def _work(calls: SimpleQueue[_Call[Any]]) -> None:
    while True:
        call = calls.get()
        try:
            call.result = call.call()
        except BaseException as error:
            call.error = error
        # `ended` lets the caller continue. Before that, this worker is listed as idle, so that the caller's next call
        # can use it.
        _idle.append(calls)
        call.ended.set()
        # Without `del`, this thread would keep what the call refers to, such as a connection, until its next call.
        del call


_overdue: dict[str, _Call[Any]] = {}
"""Calls that missed their deadline, by name. Global, because a thread that hangs outlives its caller."""


class Reader(Protocol):
    """The part of agent.system.files.System that this module needs."""

    root: str

    def read_text(self, path: str) -> str: ...


def bounded(what: str, call: Callable[[], T], seconds: float, *, is_source: bool = False) -> T:
    """Return what `call` returns. Raises TimeoutError after `seconds`, or if an earlier call named `what` still hangs.

    Raises OSError (EAGAIN) if no thread can be started.
    """
    if what in stuck():
        raise TimeoutError(errno.ETIMEDOUT, "an earlier attempt still hangs, and is not repeated until it ends", what)
    running = _Call(call, is_source=is_source)
    try:
        # Another thread may take the last idle one at any time.
        worker = _idle.pop()
    except IndexError:
        worker = SimpleQueue()
        try:
            threading.Thread(target=_work, args=(worker,), name="bounded", daemon=True).start()
        except RuntimeError as error:
            # The unit's limit of tasks (TasksMax=), or the host's, is reached.
            raise OSError(errno.EAGAIN, str(error), what) from error
    worker.put(running)
    deadline = time.monotonic() + seconds
    interval = SIGNAL_INTERVAL if threading.current_thread() is threading.main_thread() else seconds
    while not running.ended.wait(max(0.0, min(interval, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            _overdue[what] = running
            # A shortened limit may be less than a second, and would be shown as 0 s.
            limit = f"within {seconds:.0f} s" if seconds > 0.5 else "in time"
            raise TimeoutError(errno.ETIMEDOUT, f"no answer {limit}", what)
    if running.error is not None:
        raise running.error
    return running.result  # type: ignore[return-value]


def stuck() -> tuple[str, ...]:
    """Return the names of calls that missed their deadline and still hang."""
    # This loops over a copy and removes with `pop`, because several threads may call this function at the same time.
    for what in [what for what, each in list(_overdue.items()) if each.ended.is_set()]:
        _overdue.pop(what, None)
    return tuple(_overdue)


def call_device(what: str, call: Callable[[], T], seconds: float = DEVICE_CALL) -> T:
    """Return what `call` returns, as `bounded` does. Each earlier device call that still hangs halves this call's time.

    A broken driver may hang at each of a hundred files. With halving, they all take little more than twice `seconds`.
    """
    return bounded(what, call, _shortened(seconds, is_source=False))


def call_source(what: str, call: Callable[[], T], seconds: float = SOURCE_READ) -> T:
    """Return what `call` returns, as `call_device` does, for the source of a mount.

    Hanging calls to sources and to devices are counted separately: a dead server must not shorten the time for a GPU.
    """
    return bounded(what, call, _shortened(seconds, is_source=True), is_source=True)


def _shortened(seconds: float, *, is_source: bool) -> float:
    """Return the time limit for the next call: `seconds`, halved for each counted call that hangs.

    The limit is at least SHORTEST. With `is_source`, calls to the sources of mounts are counted; otherwise, all other
    calls are.
    """
    # If a call ends meanwhile, another thread may remove it from `_overdue`; `get` then returns None.
    calls = [_overdue.get(what) for what in stuck()]
    hanging = sum(each is not None and each.is_source == is_source for each in calls)
    return max(seconds / float(2**hanging), SHORTEST)


def read_device_text(system: Reader, path: str) -> str:
    """Return the text of a file that a driver provides. Raises TimeoutError if the driver does not answer."""
    return call_device(_place(system, path), lambda: system.read_text(path))


def read_device_texts(system: Reader, paths: Iterable[str], seconds: float = DEVICE_CALL) -> Iterator[str | OSError]:
    """Read many files that a driver provides, each as `read_device_text` does. Yield the text or error of each.

    A caller that stops at an error leaves only one worker behind, however many files hang.
    """
    for path in paths:
        try:
            yield call_device(_place(system, path), partial(system.read_text, path), seconds)
        except OSError as error:
            yield error


def _place(system: Reader, path: str) -> str:
    """Return the name of a call that reads a path. The name has the root prefix, because tests use many roots."""
    return path if system.root == "/" else system.root + path
