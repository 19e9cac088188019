"""Protobuf varints: integers as groups of seven bits, the lowest first.

Pure. Source: protobuf encoding, base 128 varints.
"""

from __future__ import annotations


def read_varint(raw: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the number at an offset and the offset after it.

    Raises:
        IndexError: The number is incomplete or exceeds ten bytes.
    """
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def encode_varint(value: int) -> bytes:
    """Encode a non-negative number."""
    if value < 0x80:
        return bytes((value,))
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
