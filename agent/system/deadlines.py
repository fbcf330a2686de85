"""Calls that may never return (in D state not even SIGKILL helps): left behind at their deadline, and not repeated."""

import errno
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")

DEVICE_READ = 5.0
"""Seconds for what a driver answers: the first use of a GPU holds NVIDIA's lock for some."""
SOURCE_LOOK = 2.0
"""Seconds for a directory that settings mount, which a server elsewhere may answer for."""
LEAST = 0.02
"""Seconds, of which a healthy driver needs a thousandth."""


class _Call(Generic[T]):
    """One call, to be run by a worker."""

    def __init__(self, call: Callable[[], T], *, of_source: bool) -> None:
        self.of_source = of_source
        self._call = call
        self._result: T | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def wait(self, seconds: float) -> bool:
        """Whether it came to an end."""
        return self._ended.wait(seconds)

    def result(self) -> T:
        """What it returned or raised."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        self._ended.set()


class _Worker:
    """A thread for one call after the other, as a new one for each takes longer than most calls.

    A daemon thread: the process's end does not wait for it.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()
        threading.Thread(target=self._work, name="bounded", daemon=True).start()

    def begin(self, call: _Call[Any]) -> None:
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            call.run()
            # Before the caller goes on, which may have the next call.
            _idle.append(self)
            call.end()


_idle: list[_Worker] = []


def _worker() -> _Worker:
    """Raises RuntimeError where no thread can be started."""
    try:
        return _idle.pop()
    except IndexError:
        return _Worker()


_left: dict[str, _Call[Any]] = {}
"""Calls by name that missed their deadline. One for the process: a thread that hangs stays whoever asked for it."""


class Reader(Protocol):
    """The part of agent.system.files.System that is needed here."""

    root: str

    def read_text(self, path: str) -> str: ...


def bounded(what: str, call: Callable[[], T], seconds: float, *, of_source: bool = False) -> T:
    """What `call` returns or raises; TimeoutError when it takes longer, or an earlier one of that name still hangs."""
    return _begin(what, call, seconds, of_source=of_source)()


def _begin(what: str, call: Callable[[], T], seconds: float, *, of_source: bool = False) -> Callable[[], T]:
    """The call goes on in a worker, and what is returned here waits for it as `bounded` does."""
    if what in stuck():
        raise TimeoutError(errno.ETIMEDOUT, "an earlier attempt still hangs, and is not repeated until it ends", what)
    running = _Call(call, of_source=of_source)
    try:
        worker = _worker()
    except RuntimeError as error:
        # TasksMax= of the unit, or the host's limit.
        raise OSError(errno.EAGAIN, str(error), what) from error
    worker.begin(running)
    deadline = time.monotonic() + seconds

    def end() -> T:
        if not running.wait(max(0.0, deadline - time.monotonic())):
            _left[what] = running
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:.0f} s", what)
        return running.result()

    return end


def stuck() -> tuple[str, ...]:
    """Names of the calls that missed their deadline and have not come back."""
    for what in [what for what, each in _left.items() if each.wait(0)]:
        del _left[what]
    return tuple(_left)


def ask_device(what: str, call: Callable[[], T], seconds: float = DEVICE_READ) -> T:
    """As `bounded`, for half as long with each call that hangs already: all of them take twice `seconds` at most.

    A broken driver may hang at each of a hundred files, and a pass that waits for all of them is no sign of life.
    """
    return begin_asking_device(what, call, seconds)()


def begin_asking_device(what: str, call: Callable[[], T], seconds: float = DEVICE_READ) -> Callable[[], T]:
    """For who has other things to do meanwhile: raises as `ask_device`, and so does what is returned, once called.

    It has to be called: it is what remembers a call that hangs.
    """
    return _begin(what, call, _shortened(seconds, of_source=False))


def ask_source(what: str, call: Callable[[], T], seconds: float = SOURCE_LOOK) -> T:
    """The same of what settings mount: apart, since a server that is dead is no reason to hurry a GPU."""
    return bounded(what, call, _shortened(seconds, of_source=True), of_source=True)


def _shortened(seconds: float, *, of_source: bool) -> float:
    hanging = sum(_left[what].of_source == of_source for what in stuck())
    return max(seconds / float(2**hanging), LEAST)


def read_device_text(system: Reader, path: str) -> str:
    """As System.read_text, of a file that a driver answers for: TimeoutError where it does not."""
    place = path if system.root == "/" else system.root + path
    return ask_device(place, lambda: system.read_text(path))
