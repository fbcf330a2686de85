"""Manages a server's connection slots. If no slot is free, a new connection takes the slot of another one."""

import contextlib
import socket
import threading
import time
from collections import Counter

from msgspec import Struct


class Slot(Struct):
    """The slot of one connection."""

    peer: int | str
    """Who holds it: a user's id, or an address if the peer is on another host."""
    completed: float = 0.0
    """When the request was complete, by time.monotonic(); 0 until then."""


class Peers:
    """The connections that have a slot. Slots are limited, because any process on the host can open any number."""

    def __init__(self, slots: int) -> None:
        self._limit, self._lock = slots, threading.Lock()
        self._slots: dict[socket.socket, Slot] = {}
        """Oldest connection first."""

    def admit(self, connection: socket.socket, peer: int | str, patience: float) -> bool:
        """Give the connection a slot, and return whether there was one. If necessary, close another connection.

        A connection is idle until its request is complete, and again from `patience` seconds after that, because a peer
        should have read the answer by then.
        """
        with self._lock:
            if len(self._slots) >= self._limit:
                ended = self._dispensable(peer, time.monotonic() - patience)
                if ended is None:
                    return False
                del self._slots[ended]
                # After this, the thread of that connection reads end of file, and closes the connection.
                with contextlib.suppress(OSError):
                    ended.shutdown(socket.SHUT_RDWR)
            self._slots[connection] = Slot(peer)
        return True

    def _dispensable(self, peer: int | str, cutoff: float) -> socket.socket | None:
        """Return the connection that ends in favour of a new one of `peer`; None if the new one is refused.

        Idle ones go first, and those of the peer that has most. A busy one goes only if its peer still has more than
        `peer` afterwards, or as many, or if `peer` has none: so a peer, whatever it does, cannot keep others from being
        served, and neither can somebody with many addresses or user ids keep out one who comes from another.
        """
        held = Counter(slot.peer for slot in self._slots.values())
        # A connection whose request is not complete has the time 0, so it is idle.
        idle = [each for each, slot in self._slots.items() if slot.completed < cutoff]
        ended = max(idle or self._slots, key=lambda each: held[self._slots[each].peer])
        return ended if idle or not held[peer] or held[self._slots[ended].peer] > held[peer] + 1 else None

    def request_complete(self, connection: socket.socket) -> None:
        """Record that the connection's request is complete."""
        with self._lock:
            if connection in self._slots:
                self._slots[connection].completed = time.monotonic()

    def leave(self, connection: socket.socket) -> None:
        """Free the slot of a connection that has ended."""
        with self._lock:
            self._slots.pop(connection, None)
