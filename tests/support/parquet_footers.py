"""Edits of the footers of Parquet files, for features that no writer here has.

A footer is a Thrift struct in the compact protocol. A struct is a list of `[field, type, value]`.
Source: thrift-compact-protocol.md of apache/thrift, parquet.thrift of apache/parquet-format.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

Struct = list[list[Any]]
SCHEMA, ROW_GROUPS, ENCRYPTION = 2, 4, 8
BINARY, LIST, STRUCT, I32 = 8, 9, 12, 5
_BOOLEANS = (1, 2)


def edited(data: bytes, edit: Callable[[Struct], None]) -> bytes:
    """Return a file whose footer was changed by a function."""
    (length,) = struct.unpack("<I", data[-8:-4])
    footer, _ = _read_struct(data[-8 - length : -8], 0)
    edit(footer)
    text = _struct(footer)
    return data[: -8 - length] + text + struct.pack("<I", len(text)) + data[-4:]


def field(values: Struct, number: int) -> Any:
    """Return the value of a field; that of a list is the list of its elements."""
    value = next(each for each in values if each[0] == number)[2]
    return value[1] if isinstance(value, tuple) else value


def put(values: Struct, number: int, kind: int, value: Any) -> None:
    """Set a field."""
    values[:] = [each for each in values if each[0] != number] + [[number, kind, value]]
    values.sort(key=lambda each: each[0])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte, at = data[at], at + 1
        result |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return result, at


def _read_struct(data: bytes, at: int) -> tuple[Struct, int]:
    values: Struct = []
    last = 0
    while (head := data[at]) != 0:
        at += 1
        kind = head & 15
        if head >> 4:
            last += head >> 4
        else:
            raw, at = _read_varint(data, at)
            last = (raw >> 1) ^ -(raw & 1)
        value, at = _read(data, at, kind)
        values.append([last, kind, value])
    return values, at + 1


def _read(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in _BOOLEANS:
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        raw, at = _read_varint(data, at)
        return (raw >> 1) ^ -(raw & 1), at
    if kind == BINARY:
        length, at = _read_varint(data, at)
        return data[at : at + length], at + length
    if kind in (LIST, 10):
        count, inner = data[at] >> 4, data[at] & 15
        at += 1
        if count == 15:
            count, at = _read_varint(data, at)
        elements = []
        for _ in range(count):
            if inner in _BOOLEANS:
                element, at = data[at] == 1, at + 1
            else:
                element, at = _read(data, at, inner)
            elements.append(element)
        return (inner, elements), at
    assert kind == STRUCT, kind
    return _read_struct(data, at)


def _varint(number: int) -> bytes:
    text = b""
    while number >= 128:
        text += bytes([number & 127 | 128])
        number >>= 7
    return text + bytes([number])


def _zigzag(number: int) -> bytes:
    return _varint(number << 1 if number >= 0 else (-number << 1) - 1)


def _struct(values: Struct) -> bytes:
    text, last = b"", 0
    for number, kind, value in values:
        head = (1 if value else 2) if kind in _BOOLEANS else kind
        step = number - last
        text += bytes([step << 4 | head]) if 0 < step < 16 else bytes([head]) + _zigzag(number)
        text += b"" if kind in _BOOLEANS else _text(kind, value)
        last = number
    return text + b"\0"


def _text(kind: int, value: Any) -> bytes:
    if kind == 3:
        return bytes([value])
    if kind in (4, 5, 6):
        return _zigzag(value)
    if kind == BINARY:
        return _varint(len(value)) + value
    if kind in (LIST, 10):
        inner, elements = value
        count = len(elements)
        head = bytes([count << 4 | inner]) if count < 15 else bytes([240 | inner]) + _varint(count)
        if inner in _BOOLEANS:
            return head + bytes(1 if each else 2 for each in elements)
        return head + b"".join(_text(inner, each) for each in elements)
    assert kind == STRUCT, kind
    return _struct(value)
