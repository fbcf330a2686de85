"""A server's connection slots. An idle connection must give up its slot to a new one."""

import contextlib
import socket
import threading
import time


class Peers:
    """Connections with a slot, the oldest first. Any process of the host can open as many as it likes."""

    def __init__(self, places: int) -> None:
        self._places, self._lock = places, threading.Lock()
        self._asked: dict[socket.socket, float] = {}
        """When the request was complete, by time.monotonic(); 0 until then."""

    def admit(self, connection: socket.socket, patience: float) -> bool:
        """Give it a slot, closing the oldest idle connection if necessary; False if none is idle.

        A connection is idle if it has sent no request, or has not read its answer within `patience` seconds.
        """
        with self._lock:
            if len(self._asked) >= self._places:
                late = time.monotonic() - patience
                # 0, for a connection without a request, is always long ago.
                oldest = next((each for each, asked in self._asked.items() if not asked or asked < late), None)
                if oldest is None:
                    return False
                del self._asked[oldest]
                # Its thread then reads end of file, and closes it.
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._asked[connection] = 0.0
        return True

    def asked(self, connection: socket.socket) -> None:
        """Record that its request is complete."""
        with self._lock:
            if connection in self._asked:
                self._asked[connection] = time.monotonic()

    def leave(self, connection: socket.socket) -> None:
        """Free the slot of a connection that has ended."""
        with self._lock:
            self._asked.pop(connection, None)
