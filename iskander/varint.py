"""Whole numbers as protobuf writes them: seven bits a byte, the least first.

Pure. Source: protobuf encoding, base 128 varints.
"""

from __future__ import annotations


def read_varint(raw: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it.

    Raises:
        IndexError: It does not end, or has more than ten bytes.
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


def varint(value: int) -> bytes:
    """A number's bytes."""
    if value < 0x80:
        return bytes((value,))
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
