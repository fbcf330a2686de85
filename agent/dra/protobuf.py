"""Encodes and decodes protocol buffers, as far as the kubelet's APIs need them. Pure.

Source: protobuf.dev/programming-guides/encoding. A message is a sequence of fields. Each has a tag (the field's number
and its wire type, as one varint) and a value.
"""

from collections.abc import Iterator
from enum import IntEnum

from agent.model.errors import DocumentError

VARINT_LIMIT = 10
"""Bytes of the longest varint: 64 bits, 7 in each byte."""
LARGEST = (1 << 64) - 1
"""The largest integer."""
NUMBER_LIMIT = (1 << 29) - 1
"""The largest field number."""
UTF8 = "utf-8"

Value = int | bytes
"""An integer of wire type VARINT, I64 or I32, or the bytes of a string, a message or a packed list."""


class WireType(IntEnum):
    """The types of values. Types 3 and 4, groups, do not exist in proto3."""

    VARINT = 0
    I64 = 1
    LEN = 2
    I32 = 5


FIXED = {WireType.I64: 8, WireType.I32: 4}
"""Bytes of a value of fixed length."""


def decode(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the number and value of each field. Raises DocumentError if the data is not a message."""
    offset = 0
    while offset < len(data):
        tag, offset = _decode_varint(data, offset)
        number, kind = tag >> 3, tag & 7
        if not 1 <= number <= NUMBER_LIMIT:
            raise DocumentError(f"field number {number} is not valid")
        if kind == WireType.VARINT:
            value, offset = _decode_varint(data, offset)
            yield number, value
            continue
        if kind == WireType.LEN:
            size, offset = _decode_varint(data, offset)
        elif kind in FIXED:
            size = FIXED[WireType(kind)]
        else:
            raise DocumentError(f"field {number} has wire type {kind}, which is not supported")
        if size > len(data) - offset:
            raise DocumentError(f"field {number} is longer than the rest of the message")
        raw = data[offset : offset + size]
        yield number, raw if kind == WireType.LEN else int.from_bytes(raw, "little")
        offset += size


def message(number: int, value: Value) -> bytes:
    """Return the bytes of a field that is a message. Raises DocumentError if it has another type."""
    if not isinstance(value, bytes):
        raise DocumentError(f"field {number} is an integer, not a message or string")
    return value


def text(number: int, value: Value) -> str:
    """Return a field that is a string. Raises DocumentError if it is an integer, or not UTF-8."""
    try:
        return message(number, value).decode(UTF8)
    except UnicodeDecodeError as error:
        raise DocumentError(f"field {number} is not UTF-8") from error


def flag(number: int, value: Value) -> bool:
    """Return a field that is a bool. Raises DocumentError if it is not an integer."""
    if not isinstance(value, int):
        raise DocumentError(f"field {number} is not an integer")
    return value != 0


def encode_message(number: int, content: bytes) -> bytes:
    """Return a field that is a message. Unlike a string, it is written even if it is empty."""
    return _encode_varint(number << 3 | WireType.LEN) + _encode_varint(len(content)) + content


def encode_text(number: int, value: str) -> bytes:
    """Return a field that is a string; nothing if it is empty, which is the default. Surrogates become `?`."""
    return encode_message(number, value.encode(UTF8, errors="replace")) if value else b""


def encode_texts(number: int, values: tuple[str, ...]) -> bytes:
    """Return a repeated field of strings, each of which is written even if it is empty."""
    return b"".join(encode_message(number, value.encode(UTF8, errors="replace")) for value in values)


def encode_integer(number: int, value: int) -> bytes:
    """Return a field that is an int64 or an enum; nothing if it is 0, which is the default."""
    return _encode_varint(number << 3 | WireType.VARINT) + _encode_varint(value & LARGEST) if value else b""


def encode_entry(number: int, key: str, content: bytes) -> bytes:
    """Return a field that is an entry of a map from strings to messages: field 1 is the key, field 2 the value."""
    return encode_message(number, encode_text(1, key) + encode_message(2, content))


def _encode_varint(value: int) -> bytes:
    """Return a varint: 7 bits per byte, lowest first. The highest bit of a byte says whether another byte follows."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _decode_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Return the varint at an offset, and the offset after it. Raises DocumentError."""
    value = 0
    for index, byte in enumerate(data[offset : offset + VARINT_LIMIT]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if value > LARGEST:
                raise DocumentError("an integer has more than 64 bits")
            return value, offset + index + 1
    raise DocumentError("an integer does not end")
