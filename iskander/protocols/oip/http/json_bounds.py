"""Bounds on the work of JSON: its structure is checked by bytes before values are created.

A byte of JSON may become 20 bytes of containers, whose creation holds the interpreter lock. So the
brackets and commas of a long text, without those in strings, are compared with what its shape
requires, and its values are decoded in pieces. Between two pieces the event loop continues.

Pure. Runs on: gateway loop for short texts, else the JSON thread. Source: RFC 8259.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from iskander.errors import LimitExceeded, MalformedInput

PIECE_BYTES: Final = 16_384
"""Text that is decoded at once: up to half a millisecond."""
CHECKED_BYTES: Final = 4096
"""Shorter text is decoded without a check: 1,400 empty lists take 0.2 ms."""
OBJECTS_PER_COLUMN: Final = 4
"""An input or output, its parameters, and as many of unused ones."""
MEMBERS_PER_OBJECT: Final = 8
_STRUCTURE: Final = np.zeros(256, bool)
_STRUCTURE[list(b"[],")] = True
_BRACKETS: Final = np.zeros(256, bool)
_BRACKETS[list(b"[]")] = True
_QUOTE, _COMMA, _SPACE = b'", '
_WHITESPACE: Final = b" \t\n\r"
_OTHERS: Final = bytes(set(range(256)) - set(b"[],"))
_SPACED: Final = bytes.maketrans(b"[]", b"  ")


class InvalidStructure(Exception):
    """Values that are not a flat list of the number that the shape requires, nor nested as it."""


def require_members(raw: memoryview, columns: int) -> None:
    """Raise LimitExceeded if a request has more objects or members than one of so many columns."""
    text = bytes(raw)
    objects = OBJECTS_PER_COLUMN * (columns + 1)
    for letter, most, what in (
        (b"{", objects, "objects"),
        (b":", MEMBERS_PER_OBJECT * objects, "members"),
    ):
        count = text.count(letter)
        if count > most:
            is_member = np.frombuffer(text, np.uint8) == letter[0]
            count = int(np.count_nonzero(is_member & ~_inside_strings(text)))
        if count > most:
            raise LimitExceeded(
                f"JSON has {count} {what}, limit {most} (by `limits.columns`)", wanted=most
            )


def pieces(raw: bytes | memoryview, shape: tuple[int, ...]) -> Iterator[list[Any]]:
    """Decode a list of values, flat or nested as its shape, in pieces that are flat lists.

    Raises:
        InvalidStructure: It has another form. Values of a wrong type may be in a piece.
        MalformedInput: It is not JSON.
    """
    text, count = bytes(raw), prod(shape)
    has_strings = b'"' in text
    is_flat = text.find(b"[", text.find(b"[") + 1) < 0 and text.find(b"]") == text.rfind(b"]")
    if not (has_strings or is_flat):
        _require_form(text.translate(None, _OTHERS), shape)
        flat, ends = text.translate(_SPACED), _ends(text)
    elif is_flat and not (has_strings and b"\\" in text):
        flat = text.strip(_WHITESPACE)
        if flat[:1] != b"[" or flat[-1:] != b"]":
            raise InvalidStructure
        flat = flat[1:-1]
        ends = _ends_outside_strings(flat) if has_strings else _ends(flat)
    else:
        flat, ends = _masked(text, shape)
    at = total = 0
    for end in ends if count or flat.strip(_WHITESPACE + b",") else ():
        try:
            piece: list[Any] = msgspec.json.decode(b"[" + flat[at:end] + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedInput(f"{error}, after {total} elements") from None
        total += len(piece)
        if total > count or not piece:
            raise InvalidStructure
        yield piece
        at = end + 1
    if total != count:
        raise InvalidStructure


def _ends(flat: bytes) -> Iterator[int]:
    """Ends of pieces of a text without strings, at commas; the last is its end."""
    end = flat.find(b",", PIECE_BYTES)
    while end >= 0:
        yield end
        end = flat.find(b",", end + PIECE_BYTES)
    yield len(flat)


def _ends_outside_strings(flat: bytes) -> Iterator[int]:
    """As `_ends`, for a text with strings that have no escapes: each quote begins or ends one."""
    at, end = 0, flat.find(b",", PIECE_BYTES)
    while end >= 0:
        if flat.count(b'"', at, end) % 2:
            closing = flat.find(b'"', end)
            end = flat.find(b",", closing) if closing >= 0 else -1
            continue
        yield end
        at, end = end, flat.find(b",", end + PIECE_BYTES)
    yield len(flat)


def _masked(text: bytes, shape: tuple[int, ...]) -> tuple[bytes, Iterator[int]]:
    """A text with escapes, or with brackets in strings: without other brackets, and its pieces."""
    letters, inside = np.frombuffer(text, np.uint8), _inside_strings(text)
    _require_form(letters[_STRUCTURE[letters] & ~inside].tobytes(), shape)
    flat = np.where(_BRACKETS[letters] & ~inside, np.uint8(_SPACE), letters).tobytes()
    commas = np.flatnonzero((letters == _COMMA) & ~inside)
    cuts = np.searchsorted(commas, np.arange(PIECE_BYTES, len(text), max(PIECE_BYTES, 1)))
    chosen = np.unique(cuts[cuts < len(commas)])
    return flat, iter([*commas[chosen].tolist(), len(flat)])


def _require_form(structure: bytes, shape: tuple[int, ...]) -> None:
    """Require the brackets and commas of a flat list, or of nested lists."""
    if not (_is_nested(structure, (prod(shape),)) or _is_nested(structure, shape)):
        raise InvalidStructure


def _is_nested(structure: bytes, shape: tuple[int, ...]) -> bool:
    """Whether brackets and commas are those of nested lists of this shape."""
    size = 0
    for axis in reversed(shape):
        size = axis * size + max(axis - 1, 0) + 2
        if size > len(structure):
            return False
    if size != len(structure):
        return False
    expected = b""
    for index, axis in enumerate(reversed(shape)):
        expected = b"[" + (b"," * (axis - 1) if not index else b",".join([expected] * axis)) + b"]"
    return structure == expected


def _inside_strings(text: bytes) -> NDArray[np.bool_]:
    """Which bytes are in strings, with the opening quote."""
    if b"\\" in text:
        # Pairs from the left: of three backslashes before a quote, the third escapes it.
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    # The parity of the number of quotes so far; it does not change by the overflow.
    quotes = np.frombuffer(text, np.uint8) == _QUOTE
    return (np.cumsum(quotes, dtype=np.uint8) & 1).astype(bool)
