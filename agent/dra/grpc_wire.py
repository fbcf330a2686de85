"""The parts of a call that gRPC adds to HTTP/2: status codes, message prefix, time limit, trailers. Pure.

Source: doc/PROTOCOL-HTTP2.md and doc/statuscodes.md of github.com/grpc/grpc.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from agent.model.text import one_line

PREFIX = 5
"""Length in bytes of the prefix of each message: one byte says whether the message is compressed, and four bytes
give its length."""
TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
"""The form of the `grpc-timeout` header."""
UNIT_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
CONTENT_TYPE = re.compile(rb"application/grpc([+;].*)?", re.DOTALL)

Headers = list[tuple[str, str]]


class Code(IntEnum):
    """The status codes with which a call of this server can end."""

    OK = 0
    DEADLINE_EXCEEDED = 4
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


@dataclass(frozen=True, slots=True)
class Unary:
    """A method with one response. The handler may raise RpcError; clients see other exceptions as internal errors."""

    handle: Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Streaming:
    """A method with a stream of responses. If the client is gone, the iterator is closed after its next response."""

    handle: Callable[[bytes], Iterator[bytes]]


Method = Unary | Streaming


def with_prefix(message: bytes) -> bytes:
    """Return a message with its prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def message_size(body: bytes | bytearray, limit: int) -> int | None:
    """Return the length of the message that a body begins with; None before its prefix is complete.

    Raises RpcError if the message is compressed, or longer than `limit` bytes.
    """
    if len(body) < PREFIX:
        return None
    if body[0]:
        raise RpcError(Code.UNIMPLEMENTED, "compressed messages are not supported")
    size = int.from_bytes(body[1:PREFIX], "big")
    if size > limit:
        raise RpcError(Code.RESOURCE_EXHAUSTED, f"a message has {size} bytes, more than {limit}")
    return size


def only_message(body: bytes | bytearray, limit: int) -> bytes:
    """Return the only message of a complete body. Raises RpcError if the body is not exactly one message."""
    size = message_size(body, limit)
    if size is None or len(body) != PREFIX + size:
        raise RpcError(Code.INTERNAL, "the request is not exactly one message")
    return bytes(body[PREFIX:])


def time_limit(value: bytes) -> float:
    """Return the value, in seconds, of a `grpc-timeout` header. Raises RpcError if it is malformed."""
    match = TIMEOUT.fullmatch(value)
    if not match:
        raise RpcError(Code.INTERNAL, "the grpc-timeout header is malformed")
    return int(match[1]) * UNIT_SECONDS[match[2]]


def trailers(code: Code, message: str = "") -> Headers:
    """Return the headers that end a call. In the message, `%` and all but printable ASCII are percent-encoded."""
    headers = [("grpc-status", str(int(code)))]
    if message:
        raw = one_line(message).encode(errors="replace")
        encoded = "".join(chr(each) if 0x20 <= each <= 0x7E and each != 0x25 else f"%{each:02X}" for each in raw)
        headers.append(("grpc-message", encoded))
    return headers
