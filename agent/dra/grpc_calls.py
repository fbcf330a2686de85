"""Runs the calls of a gRPC server, each in a thread, so that one that waits for an API server delays no other."""

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

from agent.dra.grpc_connection import Connection
from agent.dra.grpc_wire import Code, RpcError, Service, Unary

log = logging.getLogger(__name__)

Post = Callable[[Connection, Callable[[], None]], None]
"""Gives the server's thread something to do for a connection. Other threads must not use a connection."""


class _Job:
    """A call that runs."""

    def __init__(self, unary: bool) -> None:
        self.unary = unary
        self.gone = False
        """Whether nobody waits for responses any longer."""
        self.ready = threading.Event()
        """Set when the last response is on its way. Until then, a call with several responses makes no further one."""


class Calls:
    """The running calls of one server. Its methods are called in the server's thread."""

    def __init__(self, limit: int, post: Post) -> None:
        self.stopping = False
        """Whether calls are refused, because the server stops."""
        self._limit, self._post = limit, post
        self._jobs: dict[tuple[Connection, int], _Job] = {}
        self._threads, self._idle = threading.Semaphore(limit), threading.Semaphore(0)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls that idle threads take: to start a thread takes longer than most of what a call does."""

    @property
    def unary(self) -> bool:
        """Whether a call with one response runs."""
        return any(job.unary for job in self._jobs.values())

    def start(self, connection: Connection, stream: int, service: Service, request: bytes) -> None:
        """Run a call whose request is complete. Raises RpcError if it cannot."""
        if self.stopping:
            raise RpcError(Code.UNAVAILABLE, "the server is stopping")
        # A thread may outlive its call, so threads are counted, not calls.
        if not self._threads.acquire(blocking=False):
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"{self._limit} calls are running, which is the limit")
        job = self._jobs[connection, stream] = _Job(isinstance(service, Unary))
        call = partial(self._run, job, connection, stream, service, request)
        if self._idle.acquire(blocking=False):
            self._work.put(call)
            return
        try:
            threading.Thread(target=self._work_on, args=(call,), name="grpc-call", daemon=True).start()
        except RuntimeError as error:
            self._threads.release()
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"cannot start a thread: {error}") from error

    def sent(self, connection: Connection, stream: int) -> None:
        """Note that all responses of a call so far are on their way."""
        job = self._jobs.get((connection, stream))
        if job:
            job.ready.set()

    def ended(self, connection: Connection, stream: int) -> None:
        """Note that nobody waits for further responses of a call."""
        job = self._jobs.pop((connection, stream), None)
        if job:
            job.gone = True
            job.ready.set()

    def end(self) -> None:
        """Let the idle threads end, and each other one after its call."""
        for _ in range(self._limit):
            self._work.put(None)

    def _work_on(self, call: Callable[[], None] | None) -> None:
        """Run a call, then those that come."""
        while call is not None:
            call()
            call = self._work.get()

    def _run(self, job: _Job, connection: Connection, stream: int, service: Service, request: bytes) -> None:
        code, message, only = Code.OK, "", None
        try:
            if isinstance(service, Unary):
                only = service.handle(request)
            else:
                for response in service.handle(request):
                    job.ready.clear()
                    if job.gone:
                        break
                    self._post(connection, partial(connection.send, stream, response))
                    job.ready.wait()
        except RpcError as error:
            code, message = error.code, error.message
        # A bug in a handler must cost one call only. The log says where it is.
        except Exception as error:
            log.exception("a call has failed")
            code, message = Code.INTERNAL, f"internal error: {type(error).__name__}: {error}"
        finally:
            # Before the response, which the next call may follow. In this order, there are at most `limit` threads.
            self._idle.release()
            self._threads.release()

        def finish() -> None:
            # Together with an only response, so that the server's thread wakes up once, and the client too.
            if only is not None:
                connection.send(stream, only)
            connection.finish(stream, code, message)

        self._post(connection, finish)
