"""Structure checks of JSON text before it is decoded, and decoding in pieces.

A byte of JSON may become 20 bytes of containers, whose creation holds the interpreter lock. So the
brackets and commas of a long text are first compared with those that its shape requires; brackets
and commas in strings do not count. The values are then decoded in pieces, and the event loop
continues between two pieces.

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
"""Length of a piece: decoding it takes up to half a millisecond."""
CHECKED_BYTES: Final = 4096
"""Shorter text is decoded without a check: 1,400 empty lists take 0.2 ms."""
OBJECTS_PER_COLUMN: Final = 4
"""A request has an object for each input or output and one for its parameters; two are spare."""
MEMBERS_PER_OBJECT: Final = 8
# Whether a byte is a bracket or comma, and whether it is a bracket.
_STRUCTURE: Final = np.zeros(256, bool)
_STRUCTURE[list(b"[],")] = True
_BRACKETS: Final = np.zeros(256, bool)
_BRACKETS[list(b"[]")] = True
_QUOTE, _COMMA, _SPACE = ord('"'), ord(","), ord(" ")
_WHITESPACE: Final = b" \t\n\r"
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b"[],"))
_BRACKETS_TO_SPACES: Final = bytes.maketrans(b"[]", b"  ")


class InvalidStructure(Exception):
    """Values that are neither a flat list of the shape's length nor lists nested as the shape."""


def require_members(raw: memoryview, columns: int) -> None:
    """Raise LimitExceeded for more objects or members than a request with `columns` can need."""
    text = bytes(raw)
    objects = OBJECTS_PER_COLUMN * (columns + 1)
    for letter, limit, what in (
        (b"{", objects, "objects"),
        (b":", MEMBERS_PER_OBJECT * objects, "members"),
    ):
        count = text.count(letter)
        if count > limit:
            is_letter = np.frombuffer(text, np.uint8) == letter[0]
            count = int(np.count_nonzero(is_letter & ~_inside_strings(text)))
        if count > limit:
            raise LimitExceeded(
                f"JSON has {count} {what}, limit {limit} (by `limits.columns`)", wanted=limit
            )


def pieces(raw: bytes | memoryview, shape: tuple[int, ...]) -> Iterator[list[Any]]:
    """Decode a list of values, flat or nested as its shape, in pieces that are flat lists.

    Raises:
        InvalidStructure: The list has another number of values, or is nested otherwise. Pieces may
            nevertheless have values of a wrong type.
        MalformedInput: The text is not JSON.
    """
    count = prod(shape)
    flat, ends = _flatten(bytes(raw), shape)
    begin = total = 0
    for end in ends if count or flat.strip(_WHITESPACE + b",") else ():
        try:
            piece: list[Any] = msgspec.json.decode(b"[" + flat[begin:end] + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedInput(f"{error}, after {total} elements") from None
        total += len(piece)
        if total > count or not piece:
            raise InvalidStructure
        yield piece
        begin = end + 1
    if total != count:
        raise InvalidStructure


def _flatten(text: bytes, shape: tuple[int, ...]) -> tuple[bytes, Iterator[int]]:
    """Return the values of a list, without the brackets of lists, and the ends of the pieces."""
    has_strings = b'"' in text
    has_one_pair = text.find(b"[", text.find(b"[") + 1) < 0 and text.find(b"]") == text.rfind(b"]")
    if not (has_strings or has_one_pair):
        _require_form(text.translate(None, _NO_STRUCTURE), shape)
        return text.translate(_BRACKETS_TO_SPACES), _ends(text)
    if has_one_pair and not (has_strings and b"\\" in text):
        flat = text.strip(_WHITESPACE)
        if flat[:1] != b"[" or flat[-1:] != b"]":
            raise InvalidStructure
        flat = flat[1:-1]
        return flat, _ends_outside_strings(flat) if has_strings else _ends(flat)
    return _flatten_with_strings(text, shape)


def _ends(flat: bytes) -> Iterator[int]:
    """Ends of the pieces of a text without strings: commas, and the end of the text."""
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


def _flatten_with_strings(text: bytes, shape: tuple[int, ...]) -> tuple[bytes, Iterator[int]]:
    """Replace the brackets outside strings by spaces; return the text and the ends of its pieces.

    For lists of strings that are nested, or that have escapes or brackets in them.
    """
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
    if 0 in shape:  # The axes inside an empty one are not written: `[[]]` for 1 x 0 x 4.
        shape = shape[: shape.index(0) + 1]
    size = 0  # Compared first, so that `expected` is never longer than the structure.
    for axis in reversed(shape):
        size = axis * size + max(axis - 1, 0) + 2
        if size > len(structure):
            return False
    if size != len(structure):
        return False
    expected = b""
    for axis in reversed(shape):
        inner = b",".join([expected] * axis) if expected else b"," * (axis - 1)
        expected = b"[" + inner + b"]"
    return structure == expected


def _inside_strings(text: bytes) -> NDArray[np.bool_]:
    """Mask of the bytes in strings; it includes the opening quotes."""
    if b"\\" in text:
        # Pairs from the left: of three backslashes before a quote, the third escapes it.
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    # An odd number of quotes so far; an overflow of the sum does not change its parity.
    quotes = np.frombuffer(text, np.uint8) == _QUOTE
    return (np.cumsum(quotes, dtype=np.uint8) & 1).astype(bool)
