"""Manages a server's connection slots. A new connection takes the slot of an idle one."""

import contextlib
import socket
import threading
import time


class Peers:
    """The connections that have a slot. They need a limit: any process of the host can open as many as it likes."""

    def __init__(self, places: int) -> None:
        self._places, self._lock = places, threading.Lock()
        self._asked: dict[socket.socket, float] = {}
        """When each connection's request was complete, by time.monotonic(); 0 until then. The oldest one is first."""

    def admit(self, connection: socket.socket, patience: float) -> bool:
        """Give the connection a slot, and return whether there was one. If necessary, close the oldest idle connection.

        A connection is idle if it has sent no request, or has not read its answer within `patience` seconds.
        """
        with self._lock:
            if len(self._asked) >= self._places:
                late = time.monotonic() - patience
                # A connection without a request has the time 0, and so is idle.
                oldest = next((each for each, asked in self._asked.items() if not asked or asked < late), None)
                if oldest is None:
                    return False
                del self._asked[oldest]
                # The connection's thread then reads end of file, and closes the connection.
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._asked[connection] = 0.0
        return True

    def asked(self, connection: socket.socket) -> None:
        """Record that the connection's request is complete."""
        with self._lock:
            if connection in self._asked:
                self._asked[connection] = time.monotonic()

    def leave(self, connection: socket.socket) -> None:
        """Free the slot of a connection that has ended."""
        with self._lock:
            self._asked.pop(connection, None)
