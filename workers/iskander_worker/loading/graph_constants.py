"""Words and numbers in an ONNX file, with which its graph may compare values.

A measurement of rows uses these constants as values, because a graph may treat a row with a
constant differently, for example with a marker of missing values.

Runs on: worker main, and the process of a sandboxed load. Source: onnx.proto (NodeProto,
AttributeProto, TensorProto), protobuf wire format.
"""

from __future__ import annotations

from math import isfinite, prod
from pathlib import Path
from typing import Final

import numpy as np

from iskander.errors import ManifestError
from iskander.foundation.varint import read_varint
from iskander_worker.loading.onnx_external import read_field

FIELDS_MAX = 1 << 18
"""Limit of the fields that are visited; an ensemble of trees can have millions of them."""
DEPTH_MAX = 64
ATTRIBUTE_BYTES_MAX = 1 << 18
SMALL_ATTRIBUTE_BYTES = 200
"""A longer attribute has weights, or the nodes of trees: its words are used, and no numbers."""
WORDS_MAX = 4096
WORD_BYTES_MAX = 32
NUMBERS_MAX = 64
ELEMENTS_MAX = 16
"""Limit of the elements of a tensor or attribute whose numbers are used; more are weights."""

_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _LONG_ATTRIBUTE, _TENSOR, _FUNCTION = range(7)
_INNER: Final = {
    _MODEL: {7: _GRAPH, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _TENSOR},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH},
    _LONG_ATTRIBUTE: {5: _TENSOR, 6: _GRAPH},
    _TENSOR: {},
    _FUNCTION: {7: _NODE},
}
"""Inner messages that are visited, by kind of message and field number."""
_OP_TYPE = 4
_DIVISIONS = (b"Div", b"Mod")
_FLOAT, _INTEGER, _FLOATS, _INTEGERS, _STRINGS = 2, 3, 7, 8, 9
_DIMS, _DATA_TYPE, _STRING_DATA, _RAW_DATA = 1, 2, 6, 9
_PACKED: Final = {4: "<f4", 10: "<f8"}
"""Field numbers of packed numbers of fixed size: `float_data` and `double_data`."""
_VARINTS = (5, 7)
"""Field numbers of packed integers: `int32_data` and `int64_data`."""
_ELEMENTS: Final = {
    1: "<f4", 2: "u1", 3: "i1", 4: "<u2", 5: "<i2", 6: "<i4", 7: "<i8", 10: "<f2", 11: "<f8",
    12: "<u4", 13: "<u8",
}  # fmt: skip
"""NumPy types of `raw_data` by `TensorProto.DataType`."""


class GraphConstants:
    """Constants that were found in a file.

    Attributes:
        fields: Number of fields that were visited.
        words: Texts of tensors and attributes, such as categories.
        numbers: Numbers of small tensors and attributes.
        has_divisions: The graph may divide integers; true if the file was not read to its end.
    """

    def __init__(self) -> None:
        self.fields = 0
        self.words: dict[str, None] = {}
        self.numbers: dict[float, None] = {}
        self.has_divisions = False

    def add_word(self, raw: bytes) -> None:
        """Add a text of letters and digits."""
        is_short = len(raw) <= WORD_BYTES_MAX
        if is_short and raw.isalnum() and raw.isascii() and len(self.words) < WORDS_MAX:
            self.words[raw.decode()] = None

    def add_numbers(self, numbers: np.ndarray | list[int]) -> None:
        """Add the numbers of a small tensor or attribute."""
        if len(numbers) <= ELEMENTS_MAX:
            for number in np.asarray(numbers, np.float64).tolist():
                if len(self.numbers) < NUMBERS_MAX and isfinite(number):
                    self.numbers[number] = None


def constants_of(path: Path) -> GraphConstants:
    """Return the constants of a graph file; none for a file that is absent or no ONNX file."""
    found = GraphConstants()
    try:
        raw = np.memmap(path, np.uint8, "r").data  # Most of a large file is not touched.
        is_whole = _visit_messages(raw, path.name, found)
    except (OSError, ManifestError, IndexError, ValueError):  # An empty file cannot be mapped.
        is_whole = False
    if not is_whole:
        found.has_divisions = True
    return found


def _visit_messages(raw: memoryview, name: str, found: GraphConstants) -> bool:
    """Visit the messages of a file; return whether it was read to its end."""
    pending = [(_MODEL, 0, len(raw))]
    while pending:
        kind, at, stop = pending.pop()
        if kind == _TENSOR:
            _add_tensor(raw, at, stop, name, found)
            continue
        while at < stop:
            found.fields += 1
            if found.fields > FIELDS_MAX:
                return False
            number, begin, end = read_field(raw, at, stop, name)
            inner = _INNER[kind].get(number)
            if inner is not None and begin >= 0:
                if inner == _ATTRIBUTE and end - begin > SMALL_ATTRIBUTE_BYTES:
                    inner = _LONG_ATTRIBUTE
                is_skipped = inner == _LONG_ATTRIBUTE and end - begin > ATTRIBUTE_BYTES_MAX
                if not is_skipped and len(pending) < DEPTH_MAX:
                    pending += [(kind, end, stop), (inner, begin, end)]
                    break
            elif kind == _NODE and number == _OP_TYPE:
                is_short = begin >= 0 and end - begin == len(_DIVISIONS[0])
                found.has_divisions |= is_short and bytes(raw[begin:end]) in _DIVISIONS
            elif number == _STRINGS and kind in (_ATTRIBUTE, _LONG_ATTRIBUTE):
                found.add_word(bytes(raw[begin : min(end, begin + WORD_BYTES_MAX + 1)]))
            elif kind == _ATTRIBUTE:
                _add_attribute(raw, number, at, begin, end, found)
            at = end
    return True


def _add_attribute(
    raw: memoryview, number: int, at: int, begin: int, end: int, found: GraphConstants
) -> None:
    """Add the numbers of a field of an attribute.

    `at` is the position of its tag. `begin` is negative for a field without a length: a number. A
    list is one field with all numbers, or a field for each.
    """
    if number in (_FLOAT, _FLOATS):
        found.add_numbers(np.frombuffer(raw[begin if begin >= 0 else end - 4 : end], "<f4"))
    elif number in (_INTEGER, _INTEGERS):
        found.add_numbers(_decode_integers(raw, begin if begin >= 0 else at + 1, end))


def _add_tensor(raw: memoryview, at: int, stop: int, name: str, found: GraphConstants) -> None:
    """Add the words of a tensor, and its numbers if it is small."""
    dims: list[int] = []
    element = 0
    numbers: np.ndarray | list[int] = []
    data = memoryview(b"")
    for _ in range(WORDS_MAX):
        if at >= stop:
            break
        begun = at
        found.fields += 1
        number, begin, at = read_field(raw, at, stop, name)
        if number == _STRING_DATA and begin >= 0:
            found.add_word(bytes(raw[begin : min(at, begin + WORD_BYTES_MAX + 1)]))
        elif number == _DIMS:
            dims += (
                _decode_integers(raw, begin, at) if begin >= 0 else [read_varint(raw, begun + 1)[0]]
            )
        elif number == _DATA_TYPE and begin < 0:
            element = read_varint(raw, begun + 1)[0]
        elif begin >= 0 and at - begin <= 10 * ELEMENTS_MAX:
            if number == _RAW_DATA:
                data = raw[begin:at]
            elif number in _PACKED:
                numbers = np.frombuffer(raw[begin:at], _PACKED[number])
            elif number in _VARINTS:
                numbers = _decode_integers(raw, begin, at)
    if prod(dims) <= ELEMENTS_MAX:
        if element in _ELEMENTS and data:
            numbers = np.frombuffer(data, _ELEMENTS[element])
        found.add_numbers(numbers)


def _decode_integers(raw: memoryview, at: int, stop: int) -> list[int]:
    """Decode packed integers, of which negative ones have ten bytes."""
    found: list[int] = []
    while at < stop and len(found) <= ELEMENTS_MAX:
        value, at = read_varint(raw[:stop], at)
        found.append(value - (1 << 64) if value >> 63 else value)
    return found
