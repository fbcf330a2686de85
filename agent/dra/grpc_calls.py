"""Runs the calls of a gRPC server, each in its own thread: one that waits for the API server must not delay others."""

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

from agent.dra.grpc_connection import Connection
from agent.dra.grpc_wire import Code, Method, RpcError, Unary

log = logging.getLogger(__name__)

Post = Callable[[Connection, Callable[[], None]], None]
"""Makes the server's thread run an action for a connection. Other threads must not use connections."""


class _Job:
    """A running call."""

    def __init__(self, unary: bool) -> None:
        self.unary = unary
        self.gone = False
        """Whether the client no longer waits for responses."""
        self.ready = threading.Event()
        """Set when the latest response has been sent, or when the client no longer waits. A call with several responses
        waits for this event before it makes the next response."""


class Calls:
    """The running calls of one server. The public methods are called in the server's thread."""

    def __init__(self, unary: int, streams: int, memory: int, post: Post) -> None:
        """Limit the running calls with one response, those with several responses, and the bytes of their requests."""
        self.stopping = False
        """Whether new calls are refused, because the server is stopping."""
        self._memory, self._post = memory, post
        self._jobs: dict[tuple[Connection, int], _Job] = {}
        self._limits = {True: unary, False: streams}
        """The limits of calls with one response, and of others. They are separate, because streams may last as long as
        a connection, and must not keep claims from being prepared."""
        self._lock = threading.Lock()
        """For `_busy` and `held`."""
        self._busy = {True: 0, False: 0}
        """How many threads are busy with calls that have one response, and how many with others. If the client no
        longer waits for a call, the call has ended, but its thread may still be busy. So threads are counted."""
        self.held = 0
        """Bytes of the requests of these calls."""
        self._idle = threading.Semaphore(0)
        """How many threads wait for a call."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls for idle threads; None ends a thread. A thread is kept for further calls, because most calls take less
        time than starting a thread."""

    @property
    def unary_running(self) -> bool:
        """Whether a call with one response is running."""
        return any(job.unary for job in self._jobs.values())

    def start(self, connection: Connection, stream: int, method: Method, request: bytes) -> None:
        """Run a call whose request is complete. Raises RpcError if it cannot."""
        if self.stopping:
            raise RpcError(Code.UNAVAILABLE, "the server is stopping")
        unary = isinstance(method, Unary)
        self._occupy(unary, len(request))
        job = self._jobs[connection, stream] = _Job(unary)
        call = partial(self._run, job, connection, stream, method, request)
        if self._idle.acquire(blocking=False):
            self._work.put(call)
            return
        try:
            threading.Thread(target=self._work_on, args=(call,), name="grpc-call", daemon=True).start()
        except RuntimeError as error:
            self._release(unary, len(request))
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"cannot start a thread: {error}") from error

    def _occupy(self, unary: bool, size: int) -> None:
        """Count a call with a request of this size. Raises RpcError if that is one too many."""
        with self._lock:
            if self._busy[unary] >= self._limits[unary]:
                kind = "calls" if unary else "streams"
                raise RpcError(Code.RESOURCE_EXHAUSTED, f"{self._limits[unary]} {kind} are running, which is the limit")
            if self.held + size > self._memory:
                raise RpcError(Code.RESOURCE_EXHAUSTED, f"requests have more than {self._memory} bytes together")
            self._busy[unary] += 1
            self.held += size

    def _release(self, unary: bool, size: int) -> None:
        with self._lock:
            self._busy[unary] -= 1
            self.held -= size

    def sent(self, connection: Connection, stream: int) -> None:
        """Note that all responses that a call has made so far have been sent."""
        job = self._jobs.get((connection, stream))
        if job:
            job.ready.set()

    def ended(self, connection: Connection, stream: int) -> None:
        """Note that the client no longer waits for responses of a call."""
        job = self._jobs.pop((connection, stream), None)
        if job:
            job.gone = True
            job.ready.set()

    def end(self) -> None:
        """Make all threads end: idle ones now, others after their calls."""
        for _ in range(sum(self._limits.values())):
            self._work.put(None)

    def _work_on(self, call: Callable[[], None] | None) -> None:
        """Run a call, and then the calls from the queue, until the queue yields None."""
        while call is not None:
            call()
            call = self._work.get()

    def _run(self, job: _Job, connection: Connection, stream: int, method: Method, request: bytes) -> None:
        code, message, unary_response = Code.OK, "", None
        try:
            if isinstance(method, Unary):
                unary_response = method.handle(request)
            else:
                for response in method.handle(request):
                    job.ready.clear()
                    if job.gone:
                        break
                    self._post(connection, partial(connection.send, stream, response))
                    job.ready.wait()
        except RpcError as error:
            code, message = error.code, error.message
        # A bug in a handler must fail only this call. The log has the traceback.
        except Exception as error:
            log.exception("a call has failed")
            code, message = Code.INTERNAL, f"internal error: {type(error).__name__}: {error}"
        finally:
            # Release both before the response is sent, because the client's next call may follow at once. `_idle` comes
            # first. If it came last, the next call could start a new thread although this thread is about to be idle,
            # and there could be more threads than the limits permit.
            self._idle.release()
            self._release(job.unary, len(request))

        def finish() -> None:
            # The response of a unary call is sent together with its end: server and client wake up only once.
            if unary_response is not None:
                connection.send(stream, unary_response)
            connection.finish(stream, code, message)

        self._post(connection, finish)
