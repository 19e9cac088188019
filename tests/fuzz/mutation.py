"""Mutations of bytes, numbers, and sequences of frames; protobuf messages as trees of fields."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from iskander.foundation.decoders import DECODE_ERRORS
from iskander.foundation.varint import encode_varint

Element = TypeVar("Element")
BYTES: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x20, 0x2C)
NUMBERS: Final = (
    0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 32, 63, 64, 65, 127, 128, 129, 255, 256, 1000, 1023,
    1024, 4095, 4096, 16_383, 16_384, 16_385, 32_767, 32_768, 65_535, 65_536, 1 << 20,
    (1 << 24) - 1, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
)  # fmt: skip


def number(random: Random, near: int = 0) -> int:
    """An unsigned number: a boundary value, one near `near`, or a random one."""
    kind = random.randrange(4)
    if kind == 0:
        return random.choice(NUMBERS)
    if kind == 1:
        return max(near + random.choice((-2, -1, 1, 2, 8, -8, 64, -64)), 0)
    if kind == 2:
        return random.randrange(300)
    return random.getrandbits(random.choice((8, 16, 31, 32, 63, 64)))


def text(random: Random, alphabet: str, length_max: int) -> str:
    """Characters of an alphabet."""
    return "".join(random.choice(alphabet) for _ in range(random.randrange(length_max + 1)))


def flip(raw: bytes, other: bytes, random: Random) -> bytes:
    """Change bytes regardless of the format."""
    if not raw:
        return random.randbytes(random.randrange(1, 9))
    at = random.randrange(len(raw))
    some = bytearray(raw)
    match random.randrange(8):
        case 0:
            some[at] ^= 1 << random.randrange(8)
        case 1:
            some[at] = random.choice(BYTES)
        case 2:
            some[at] = (some[at] + random.choice((-1, 1))) & 0xFF
        case 3:
            del some[at : at + random.choice((1, 1, 2, 4, 8, 16, 64))]
        case 4:
            some[at:at] = random.randbytes(random.choice((1, 1, 2, 4, 8)))
        case 5:
            some[at:at] = some[at : at + random.choice((1, 2, 4, 8, 16, 64))]
        case 6:
            begin = random.randrange(len(other) + 1)
            some[at:] = other[begin:]
        case _:
            begin = random.randrange(len(other) + 1)
            piece = other[begin : begin + random.choice((1, 2, 4, 8, 16, 64))]
            some[at : at + len(piece)] = piece
    return bytes(some)


def patch_document(
    frame: bytes,
    other: bytes,
    random: Random,
    change: Callable[[Any, Random], Any],
    encode: Callable[[Any], bytes],
) -> bytes:
    """Change the decoded value of a MessagePack frame, or its bytes."""
    if not random.randrange(4):
        return flip(frame, other, random)
    try:
        document = msgspec.msgpack.decode(frame)
    except DECODE_ERRORS:
        return flip(frame, other, random)
    return encode(change(document, random))


def patch(raw: bytes, random: Random, formats: Sequence[str] = ("<i", "<q", "<H")) -> bytes:
    """Overwrite an aligned integer with another number, for headers of fixed layout."""
    kind = struct.Struct(random.choice(formats))
    places = len(raw) // kind.size
    if not places:
        return flip(raw, raw, random)
    at = random.randrange(places) * kind.size
    (current,) = kind.unpack_from(raw, at)
    value = number(random, int(current)) & ((1 << 8 * kind.size) - 1)
    return raw[:at] + value.to_bytes(kind.size, "little") + raw[at + kind.size :]


def shuffle(
    items: list[Element],
    others: list[Element],
    random: Random,
    change: Callable[[Element], Element],
    make: Callable[[], Element] | None = None,
) -> list[Element]:
    """Change a sequence: replace, insert, delete, repeat or swap elements."""
    items = list(items)
    kind = random.randrange(10)
    if make is not None and (kind == 0 or not items):
        items.insert(random.randint(0, len(items)), make())
    elif not items:
        items = list(others)
    elif kind == 1:
        del items[random.randrange(len(items))]
    elif kind == 2:
        at = random.randrange(len(items))
        items[at:at] = [items[at]] * random.choice((1, 1, 1, 2, 20))
    elif kind == 3:
        at, to = random.randrange(len(items)), random.randrange(len(items))
        items[at], items[to] = items[to], items[at]
    elif kind == 4 and others:
        begin = random.randrange(len(others))
        items[random.randrange(len(items) + 1) :] = others[begin:]
    elif kind == 5 and others:
        items.insert(random.randint(0, len(items)), random.choice(others))
    else:
        at = random.randrange(len(items))
        items[at] = change(items[at])
    return items


class Field(NamedTuple):
    """A protobuf field; its value is a number or bytes."""

    number: int
    kind: int
    value: Any


def split_fields(raw: bytes) -> list[Field] | None:
    """The fields of a message; None if it is malformed."""
    fields, at = [], 0
    try:
        while at < len(raw):
            tag, at = _varint(raw, at)
            kind, value = tag & 7, b""
            if kind == 0:
                value, at = _varint(raw, at)
            elif kind in (1, 2, 5):
                length = {1: 8, 5: 4}.get(kind, 0)
                if kind == 2:
                    length, at = _varint(raw, at)
                value, at = raw[at : at + length], at + length
            else:
                return None
            fields.append(Field(tag >> 3, kind, value))
    except IndexError:
        return None
    return fields if at == len(raw) else None


def join_fields(fields: list[Field], random: Random | None = None) -> bytes:
    """A message; some tags and lengths have more bytes than needed."""
    pieces = []
    for number_, kind, value in fields:
        pieces.append(_encoded(number_ << 3 | kind, random))
        if kind == 0:
            pieces.append(_encoded(value, random))
        elif kind == 2:
            pieces += (_encoded(len(value), random), value)
        else:
            pieces.append(value)
    return b"".join(pieces)


def protobuf(raw: bytes, other: bytes, random: Random, numbers: Sequence[int]) -> bytes:
    """Change a message field by field, at any depth.

    Args:
        raw: The message.
        other: A second message, as a source of fields.
        random: The run's generator.
        numbers: Numbers of new fields.
    """
    fields = split_fields(raw)
    if fields is None:
        return flip(raw, other, random)

    def change(field: Field) -> Field:
        kind = random.randrange(6)
        if kind == 0:
            return field._replace(number=random.choice(numbers))
        if kind == 1:
            return _new_field(random, numbers)
        if field.kind == 0:
            return field._replace(value=number(random, field.value) & ((1 << 64) - 1))
        if field.kind == 2 and random.randrange(3) and field.value:
            return field._replace(value=protobuf(field.value, other, random, numbers))
        return field._replace(value=_with_length(field.kind, flip(field.value, other, random)))

    changed = shuffle(
        fields, split_fields(other) or [], random, change, lambda: _new_field(random, numbers)
    )
    return join_fields(changed, random)


def _new_field(random: Random, numbers: Sequence[int]) -> Field:
    number_ = random.choice((*numbers, number(random) & ((1 << 29) - 1)))
    kind = random.choice((0, 1, 2, 2, 2, 5, 3, 4))
    if kind == 0:
        return Field(number_, kind, number(random) & ((1 << 64) - 1))
    return Field(
        number_, kind, _with_length(kind, random.randbytes(random.choice((0, 1, 3, 8, 200))))
    )


def _with_length(kind: int, value: bytes) -> bytes:
    length = {1: 8, 5: 4, 3: 0, 4: 0}.get(kind, len(value))
    return value[:length].ljust(length, b"\0")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _encoded(value: int, random: Random | None) -> bytes:
    raw = encode_varint(value)
    if random is not None and not random.randrange(24):
        more = random.choice((1, 2, 9))
        raw = raw[:-1] + bytes((raw[-1] | 0x80,)) + b"\x80" * (more - 1) + b"\0"
    return raw
