"""Manages a server's connection slots. If no slot is free, a new connection takes the slot of an idle connection."""

import contextlib
import socket
import threading
import time


class Peers:
    """The connections that have a slot. Slots are limited, because any process on the host can open any number."""

    def __init__(self, slots: int) -> None:
        self._slots, self._lock = slots, threading.Lock()
        self._completed: dict[socket.socket, float] = {}
        """When each connection's request was complete, by time.monotonic(); 0 until then. Oldest connection first."""

    def admit(self, connection: socket.socket, patience: float) -> bool:
        """Give the connection a slot, and return whether there was one. If necessary, close the oldest idle connection.

        A connection is idle until its request is complete, and again from `patience` seconds after that, because a peer
        should have read the answer by then.
        """
        with self._lock:
            if len(self._completed) >= self._slots:
                cutoff = time.monotonic() - patience
                # A connection whose request is not complete has the time 0, so it is idle.
                oldest = next((each for each, at in self._completed.items() if not at or at < cutoff), None)
                if oldest is None:
                    return False
                del self._completed[oldest]
                # After this, the thread of the oldest connection reads end of file, and closes the connection.
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._completed[connection] = 0.0
        return True

    def request_complete(self, connection: socket.socket) -> None:
        """Record that the connection's request is complete."""
        with self._lock:
            if connection in self._completed:
                self._completed[connection] = time.monotonic()

    def leave(self, connection: socket.socket) -> None:
        """Free the slot of a connection that has ended."""
        with self._lock:
            self._completed.pop(connection, None)
