"""The server's side of a gRPC connection: turns HTTP/2 into calls, and responses into HTTP/2. No I/O, no threads.

h2 implements HTTP/2 (RFC 9113) and HPACK. This module adds what gRPC adds: rules for requests, status codes, message
prefix and trailers (doc/PROTOCOL-HTTP2.md and doc/statuscodes.md of github.com/grpc/grpc). It sends no more
than the client's flow control windows allow. grpcio is not used: the release that Debian and Ubuntu package has open
faults that block a server, holds a thread for each stream, and does not say which process has connected.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError

from agent.model.text import one_line

PREFIX = 5
"""Bytes before each message: one says whether it is compressed, and four give its length."""
INCOMPLETE_LIMIT = 1 << 17
"""Bytes that may arrive without completing a frame or headers. h2 would keep any number of them, because it checks a
frame's length only when the frame is complete."""

Headers = list[tuple[str, str]]
RESPONSE: Headers = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-accept-encoding", "identity")]


class Code(IntEnum):
    """The status codes with which a call of this server can end."""

    OK = 0
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class RpcError(Exception):
    """The error with which a call ends."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ConnectionLostError(Exception):
    """The connection is no longer usable. Bytes that are still to be sent may tell the client why."""


class Streaming(NamedTuple):
    """A method with a stream of responses: the server sends one at once, and one for each `push`."""

    current: Callable[[], bytes]
    """Returns the response to send now."""


Method = Callable[[bytes], bytes] | Streaming
"""A function from a request to its response may raise RpcError; clients see other exceptions as internal errors."""


def with_prefix(message: bytes) -> bytes:
    """Return a message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def trailers(code: Code, message: str = "") -> Headers:
    """Return the headers that end a call. In the message, `%` and all but printable ASCII are percent-encoded."""
    headers = [("grpc-status", str(int(code)))]
    if message:
        raw = one_line(message).encode(errors="replace")
        encoded = "".join(chr(each) if 0x20 <= each <= 0x7E and each != 0x25 else f"%{each:02X}" for each in raw)
        headers.append(("grpc-message", encoded))
    return headers


class _Http2(H2Connection):
    """h2's connection with lower limits on memory. A kubelet may use one connection, with many calls, for months."""

    DEFAULT_MAX_HEADER_LIST_SIZE = 1 << 14
    MAX_CLOSED_STREAMS = 1 << 10


@dataclass(slots=True, eq=False)
class Call:
    """A call, from its headers until its trailers are sent."""

    method: Method
    body: bytearray = field(default_factory=bytearray)
    """What has arrived of the request; empty again once the request is complete."""
    request: bytes = b""
    complete: bool = False
    """Whether the client has sent the whole request."""
    answered: bool = False
    """Whether the response's headers have been sent."""
    unsent: bytearray = field(default_factory=bytearray)
    """Bytes of the response that the flow control windows have held back."""
    trailers: Headers | None = None
    """Sent after all of `unsent`; None while the call runs."""


Start = Callable[[Any, int, Call], None]
"""Runs a call whose request is complete, given its connection and stream. Raises RpcError if it cannot."""


class Connection:
    """The server's side of a connection."""

    def __init__(self, methods: Mapping[str, Method], start: Start, message_limit: int) -> None:
        self.calls: dict[int, Call] = {}
        """Open calls by HTTP/2 stream."""
        self.greeted = False
        """Whether the client has sent its settings, the first frame of HTTP/2."""
        self._methods, self._start, self._message_limit = methods, start, message_limit
        # Only headers from the client are validated: this module makes the few headers that are sent.
        self._http2 = _Http2(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self._http2.initiate_connection()
        self._incomplete = 0

    @property
    def held(self) -> int:
        """Bytes that are kept of requests, and of responses that the client's windows have held back."""
        return self._incomplete + sum(len(call.body) + len(call.unsent) for call in self.calls.values())

    def receive(self, data: bytes) -> None:
        """Handle bytes from the client. Raises ConnectionLostError."""
        try:
            events = self._http2.receive_data(data)
            self._incomplete = 0 if events else self._incomplete + len(data)
            if self._incomplete > INCOMPLETE_LIMIT:
                raise ConnectionLostError("a frame is too long")
            for event in events:
                self._handle(event)
        except ConnectionLostError:
            raise
        # Catch every exception, not only h2's ProtocolError: a bug must end only this connection.
        except Exception as error:
            raise ConnectionLostError(f"{type(error).__name__}: {error}") from error

    def to_send(self) -> bytes:
        """Return the bytes that have become ready for the client since the last call."""
        return self._http2.data_to_send()

    def send(self, stream: int, message: bytes) -> None:
        """Send a message of a response, unless the call has ended."""
        call = self.calls.get(stream)
        if call and call.trailers is None:
            call.unsent += with_prefix(message)
            self._flush(stream, call)

    def finish(self, stream: int, code: Code, message: str = "") -> None:
        """End a call once all of its response is sent, unless the call has ended already."""
        call = self.calls.get(stream)
        if call and call.trailers is None:
            call.trailers = trailers(code, message)
            self._flush(stream, call)

    def refuse(self, code: Code, message: str) -> None:
        """End all calls, and announce with GOAWAY that no further call is served. Nothing can be sent after that."""
        for stream, call in list(self.calls.items()):
            call.unsent.clear()
            self.finish(stream, code, message)
        with contextlib.suppress(ProtocolError):
            self._http2.close_connection()

    def _handle(self, event: Event) -> None:
        match event:
            case RequestReceived():
                self._open(event)
            case DataReceived():
                self._http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                self._receive_body(event.stream_id, event.data)
            case StreamEnded():
                self._receive_body(event.stream_id, b"", end=True)
            case StreamReset():
                self.calls.pop(event.stream_id, None)
            case RemoteSettingsChanged() | WindowUpdated():
                self.greeted = True
                for stream, call in list(self.calls.items()):
                    self._flush(stream, call)
            case ConnectionTerminated():
                raise ConnectionLostError("the client has ended the connection")
            case _:
                # Other events need no action: for example, acknowledged pings and settings, and priorities.
                pass

    def _open(self, event: RequestReceived) -> None:
        # Neither the HTTP method nor the content type matters: other clients than the kubelet cannot connect. A client
        # that no longer waits resets the stream, so the header `grpc-timeout` is ignored.
        path = next((bytes(value) for name, value in event.headers if name == b":path"), b"").decode(errors="replace")
        method = self._methods.get(path)
        if method is None:
            end = trailers(Code.UNIMPLEMENTED, f"there is no method {path[:200]}")
            self._send_end(event.stream_id, [*RESPONSE, *end])
        else:
            self.calls[event.stream_id] = Call(method)

    def _receive_body(self, stream: int, data: bytes, end: bool = False) -> None:
        """Add a part of a request, and start the call at its end. The body must be exactly one message."""
        call = self.calls.get(stream)
        if call is None or call.trailers is not None:
            return
        call.body += data
        call.complete = end
        try:
            size = int.from_bytes(call.body[1:PREFIX], "big") if len(call.body) >= PREFIX else 0
            if call.body[:1] > b"\0":
                raise RpcError(Code.UNIMPLEMENTED, "compressed messages are not supported")
            if size > self._message_limit:
                raise RpcError(Code.RESOURCE_EXHAUSTED, f"a message has {size} bytes, more than {self._message_limit}")
            if len(call.body) > PREFIX + size or (end and len(call.body) < PREFIX + size):
                raise RpcError(Code.INTERNAL, "the request is not exactly one message")
            if end:
                call.request = bytes(call.body[PREFIX:])
                call.body.clear()
                self._start(self, stream, call)
        except RpcError as error:
            self.finish(stream, error.code, error.message)

    def _flush(self, stream: int, call: Call) -> None:
        """Send as much as the client's windows allow, and the trailers once the response is sent."""
        try:
            if call.unsent and not call.answered:
                self._http2.send_headers(stream, RESPONSE)
                call.answered = True
            while call.unsent:
                size = min(self._http2.local_flow_control_window(stream), self._http2.max_outbound_frame_size)
                if size <= 0:
                    return
                self._http2.send_data(stream, bytes(call.unsent[:size]))
                del call.unsent[:size]
        except ProtocolError:
            self.calls.pop(stream, None)
            return
        if call.trailers is not None:
            self._send_end(stream, call.trailers if call.answered else [*RESPONSE, *call.trailers])

    def _send_end(self, stream: int, headers: Headers) -> None:
        """Send the headers that end a response."""
        call = self.calls.pop(stream, None)
        # A ProtocolError is no fault here: the client may already have reset the stream, because one read may contain a
        # request and also its reset.
        with contextlib.suppress(ProtocolError):
            self._http2.send_headers(stream, headers, end_stream=True)
            if call is None or not call.complete:
                # Tell the client that it need not send the rest of the request (RFC 9113, section 8.1).
                self._http2.reset_stream(stream, ErrorCodes.NO_ERROR)
