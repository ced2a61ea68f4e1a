"""Protocol Buffers' wire format, as much of it as Tinker's messages use.

Unknown fields are passed over, so that a newer SDK's requests are read as well.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from palestra.core.errors import PalestraError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
Value = int | float | memoryview


def read_fields(data: memoryview) -> Iterator[tuple[int, Value]]:
    """(number, value) of each field in turn: integers, doubles, and what has a length as bytes."""
    at, end = 0, len(data)
    while at < end:
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        value: Value
        if kind == _VARINT:
            value, at = _read_varint(data, at)
        elif kind == _BYTES:
            length, at = _read_varint(data, at)
            value, at = _piece(data, at, length), at + length
        elif kind == _FIXED64:
            (value,) = struct.unpack("<d", _piece(data, at, 8))
            at += 8
        elif kind == _FIXED32:
            (value,) = struct.unpack("<f", _piece(data, at, 4))
            at += 4
        else:
            raise malformed(f"a field has wire type {kind}")
        if not number:
            raise malformed("a field has the number 0")
        yield number, value


def read_varints(value: Value) -> list[int]:
    """A repeated integer: packed, or one that came by itself."""
    if not isinstance(value, memoryview):
        return [as_int(value)]
    found, at = [], 0
    while at < len(value):
        number, at = _read_varint(value, at)
        found.append(number)
    return found


def as_int(value: Value) -> int:
    if not isinstance(value, int):
        raise malformed("a field that should be an integer is none")
    return value


def as_float(value: Value) -> float:
    if isinstance(value, memoryview):
        raise malformed("a field that should be a number is none")
    return float(value)


def as_bytes(value: Value) -> memoryview:
    if not isinstance(value, memoryview):
        raise malformed("a field that should hold bytes holds a number")
    return value


def as_text(value: Value) -> str:
    try:
        return str(as_bytes(value), "utf-8")
    except UnicodeDecodeError:
        raise malformed("a text is not UTF-8") from None


def malformed(what: str) -> PalestraError:
    return PalestraError(f"the body is not a whole protobuf message of the Tinker SDK: {what}")


def integer(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def double(number: int, value: float) -> bytes:
    return _varint(number << 3 | _FIXED64) + struct.pack("<d", value)


def block(number: int, value: bytes | str) -> bytes:
    """A field of bytes, text or a message."""
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data


def integers(number: int, values: tuple[int, ...]) -> bytes:
    """A repeated integer, packed."""
    return block(number, b"".join(map(_varint, values))) if values else b""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """A signed 64-bit integer, and where the next field begins."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise malformed("it ends too early" if at >= len(data) else "an integer has more than 64 bits")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            value &= (1 << 64) - 1
            return (value - (1 << 64) if value >> 63 else value), at
        shift += 7


def _piece(data: memoryview, at: int, length: int) -> memoryview:
    if not 0 <= length <= len(data) - at:
        raise malformed("it ends too early")
    return data[at : at + length]
