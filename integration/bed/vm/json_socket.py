"""A unix socket that carries one JSON object per line, as QEMU's monitor (QMP) and guest agent do."""

import json
import select
import socket
import time
from pathlib import Path
from typing import Any

JSONValue = str | int | float | bool | None | dict[str, Any] | list[Any]
JSONObject = dict[str, Any]


class ClosedError(Exception):
    """The other end closed the connection: QEMU has exited."""


class JSONSocket:
    """Sends and receives objects; every wait has a limit in seconds."""

    def __init__(self, path: Path, timeout: float = 60) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer = b""
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def send(self, message: JSONObject, prefix: bytes = b"", timeout: float = 60) -> None:
        """Send an object. Raises TimeoutError if nothing reads it, ClosedError if QEMU has exited."""
        self._socket.settimeout(timeout)
        try:
            self._socket.sendall(prefix + json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ClosedError(str(error)) from error

    def receive(self, timeout: float) -> JSONObject:
        """Return the next object. Lines that are not JSON (the rest of an interrupted answer) are dropped."""
        deadline = time.monotonic() + timeout
        while True:
            line, separator, rest = self._buffer.partition(b"\n")
            if not separator:
                self._fill(deadline)
                continue
            self._buffer = rest
            try:
                # 0xFF precedes the answer to guest-sync-delimited and never occurs in JSON.
                message = json.loads(line.rpartition(b"\xff")[2])
            except ValueError:
                continue
            if isinstance(message, dict):
                return message

    def _fill(self, deadline: float) -> None:
        ready, _, _ = select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError("no answer on the socket in time")
        try:
            received = self._socket.recv(1 << 20)
        except ConnectionResetError as error:
            raise ClosedError(str(error)) from error
        if not received:
            raise ClosedError("the connection was closed")
        self._buffer += received
