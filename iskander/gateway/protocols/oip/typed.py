"""Typed contents: tensor elements in the repeated fields of an InferTensorContents.

Elements are read from the received bytes; a protobuf runtime would build a list first.
Floating-point numbers have the memory layout already and are not copied.

Not compiled: a thread reads large contents, and compiled code would hold the interpreter lock.

Pure. Source: Open Inference Protocol v2, `InferTensorContents`; protobuf encoding, packed repeated
fields.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from iskander.config.schema import LimitsConfig
from iskander.contract.dtypes import DTYPES, OFFSET_BYTES
from iskander.contract.processing.strings import COLUMN_BYTES_MAX
from iskander.contract.tensors import Contract
from iskander.errors import LimitExceeded, MalformedInput
from iskander.gateway.protocols.oip.tensors import (
    NOTHING,
    STRINGS,
    Described,
    read_tensor,
    strings_max,
)
from iskander.gateway.protocols.oip.wire import FIXED_BYTES, I32, I64, LEN, VARINT, read_field
from iskander.gateway.protocols.tensors import NAME_MAX, Tensor

CONTENTS: Final = {
    1: ("bool_contents", VARINT),
    2: ("int_contents", VARINT),
    3: ("int64_contents", VARINT),
    4: ("uint_contents", VARINT),
    5: ("uint64_contents", VARINT),
    6: ("fp32_contents", I32),
    7: ("fp64_contents", I64),
    8: ("bytes_contents", LEN),
}
"""Fields of InferTensorContents by number: name, and wire type of an unpacked element."""


class _Field(NamedTuple):
    """A datatype's field number; NumPy types of the field's integers and of the datatype."""

    number: int
    wide: str = ""
    narrow: str = ""


FIELDS: Final = {
    "BOOL": _Field(1, "<u8", "?"),
    "INT8": _Field(2, "<i4", "<i1"),
    "INT16": _Field(2, "<i4", "<i2"),
    "INT32": _Field(2, "<i4", "<i4"),
    "INT64": _Field(3, "<i8", "<i8"),
    "UINT8": _Field(4, "<u4", "<u1"),
    "UINT16": _Field(4, "<u4", "<u2"),
    "UINT32": _Field(4, "<u4", "<u4"),
    "UINT64": _Field(5, "<u8", "<u8"),
    "FP32": _Field(6),
    "FP64": _Field(7),
    STRINGS: _Field(8),
}
"""Other datatypes have raw contents only."""

FIELDS_MAX: Final = 1 << 20
"""Strings and unpacked numbers in the typed contents of a request; they cost a thread half a
second."""
FIELDS_SPARE: Final = 16
"""Fields beyond the number of elements: empty packed ones and unknown ones."""
AT_ONCE: Final = 8192
"""Fields that the event loop reads in a few milliseconds; more go to a thread."""
AT_ONCE_BYTES: Final = 256 << 10
"""The same limit for bytes of packed integers and of joined contents."""
PIECE_BYTES: Final = 1 << 20
"""Varints decoded at once; the temporary memory is a multiple."""
NUMBER_BYTES_MAX: Final = 10

_BYTES: Final = {dtype.oip: max(dtype.arrow_bits // 8, 1) for dtype in DTYPES}
"""Bytes of an element; of a string without its text."""


def typed_tensors(
    described: Sequence[Described],
    typed: Mapping[int, memoryview],
    contract: Contract,
    limits: LimitsConfig,
) -> list[Tensor]:
    """Read tensors with typed contents; tensors too large for any input get no elements.

    Raises:
        MalformedInput: The datatype has no typed contents; or elements are in the wrong field, out
            of range, or differ in number from the shape.
        LimitExceeded: There are too many strings and unpacked numbers.
    """
    strings = strings_max(contract, limits)
    elements = max((spec.elements for spec in contract.inputs), default=0)
    left, tensors = FIELDS_MAX, []
    for index, (name, datatype, shape) in enumerate(described):
        if index not in typed:
            tensors.append(read_tensor(name, datatype, shape, NOTHING, strings))
            continue
        reader = _Reader(name, datatype, prod(shape), typed[index], left)
        data = NOTHING
        if datatype == STRINGS:
            if prod(shape) <= strings:
                data = reader.strings()
        elif prod(shape[1:]) <= elements:
            data = reader.numbers()
        left = reader.left
        tensors.append(Tensor(name, datatype, shape, data))
    return tensors


def require_typed(described: Sequence[Described], limits: LimitsConfig) -> None:
    """Reject typed contents with too many rows or bytes by their shapes, before reading them."""
    for _, _, shape in described:
        if shape and shape[0] > limits.rows:
            raise LimitExceeded(
                f"batch too large: {shape[0]} rows, limit {limits.rows} (`limits.rows`)",
                wanted=limits.rows,
            )
    total = typed_bytes(described)
    if total > limits.bytes:
        raise LimitExceeded(
            f"batch too large: {total} bytes, limit {limits.bytes} (`limits.bytes`)"
        )


def typed_bytes(described: Iterable[Described]) -> int:
    """Return the bytes of all elements by their shapes; of strings without their texts."""
    return sum(max(prod(shape), 0) * _BYTES.get(datatype, 1) for _, datatype, shape in described)


def are_slow(described: Sequence[Described], typed: Mapping[int, memoryview]) -> bool:
    """Return whether reading typed contents would block the event loop for too long."""
    fields = size = 0
    for index, contents in typed.items():
        _, datatype, shape = described[index]
        if datatype not in FIELDS:
            continue
        is_packed = _is_packed(contents, FIELDS[datatype].number)
        if not is_packed:
            fields += min(len(contents) // 2, max(prod(shape), 0) + FIELDS_SPARE)
        if not is_packed or FIELDS[datatype].wide:
            size += len(contents)
    return fields > AT_ONCE or size > AT_ONCE_BYTES


def _is_packed(contents: memoryview, number: int) -> bool:
    """Return whether the contents are exactly one packed field of numbers."""
    try:
        key, _, end = read_field(contents, 0, len(contents))
    except (IndexError, MalformedInput):
        return False
    kind = CONTENTS[number][1]
    return kind != LEN and key == number << 3 | LEN and end == len(contents)


class _Reader:
    """Reads one tensor's typed contents, with `left` fields left of the request's limit."""

    def __init__(
        self, name: str, datatype: str, count: int, contents: memoryview, left: int
    ) -> None:
        self._name = name
        self._datatype = datatype
        self._count = count
        self._contents = contents
        self.left = left
        if datatype not in FIELDS:
            raise self._malformed(f"{datatype[:20]} has no typed contents, send its raw bytes")
        self._field = FIELDS[datatype]

    def numbers(self) -> memoryview:
        """Return numbers in the raw form; copies only integers and contents in several fields."""
        packed, (number, wide, narrow) = self._packed(), self._field
        if not wide:
            self._require(len(packed) // FIXED_BYTES[CONTENTS[number][1]], "elements")
            return packed
        data = np.frombuffer(packed, np.uint8)
        self._require(int(np.count_nonzero(data < 0x80)), "elements")
        if narrow == "?" and not (data > 1).any():
            return packed
        try:
            return memoryview(b"".join(_narrowed(each, wide, narrow) for each in _varints(data)))
        except OverflowError:
            raise self._malformed(f"a value is out of range for {self._datatype}") from None

    def strings(self) -> memoryview:
        """Return strings in the form of `strings_to_body`; 0.4 us of CPU for each."""
        contents = self._contents
        if len(contents) > COLUMN_BYTES_MAX:
            raise LimitExceeded(
                f"a tensor has {len(contents)} bytes of strings, limit {COLUMN_BYTES_MAX}"
            )
        texts, ends = bytearray(), array("i", [0])
        for begin, end in self._values():
            texts += contents[begin:end]
            ends.append(len(texts))
        self._require(len(ends) - 1, "strings")
        assert ends.itemsize == OFFSET_BYTES
        return memoryview(b"".join((ends, texts)))

    def _packed(self) -> memoryview:
        """Return the encoded numbers; one field, the usual case, is not copied."""
        first, joined, kind = NOTHING, bytearray(), CONTENTS[self._field.number][1]
        for begin, end in self._values():
            piece = self._contents[begin:end]
            if _is_cut(piece, kind):
                raise self._malformed("its typed contents are not a valid message")
            if not first:
                first = piece
                continue
            joined += piece if joined else b"".join((first, piece))
        return memoryview(joined) if joined else first

    def _values(self) -> Iterator[tuple[int, int]]:
        """Yield the range of each value in the datatype's field: an element, or packed ones."""
        contents, number = self._contents, self._field.number
        position, end, most = 0, len(contents), max(self._count, 0) + FIELDS_SPARE
        packed = number << 3 | LEN
        while position < end:
            most -= 1
            self.left -= 1
            if most < 0:
                raise self._malformed(
                    f"its typed contents have more fields than its shape elements, {self._count}"
                )
            if self.left < 0:
                raise LimitExceeded(
                    f"the typed contents have more than {FIELDS_MAX} strings and unpacked numbers, "
                    "the limit of a request; send raw bytes"
                )
            # Halves the time of the most frequent case: short strings.
            if contents[position] == packed and position + 1 < end:
                length = contents[position + 1]
                if length < 0x80 and position + 2 + length <= end:
                    position += 2 + length
                    yield position - length, position
                    continue
            try:
                key, begin, position = read_field(contents, position, end)
            except (IndexError, MalformedInput):
                raise self._malformed("its typed contents are not a valid message") from None
            found, found_kind = key >> 3, key & 7
            if found not in CONTENTS or found_kind not in (LEN, CONTENTS[found][1]):
                continue
            if found == number:
                yield begin, position
            elif begin < position:
                raise self._malformed(
                    f"{self._datatype} uses `{CONTENTS[number][0]}`, got `{CONTENTS[found][0]}`"
                )

    def _require(self, got: int, what: str) -> None:
        if self._count != got:
            raise self._malformed(f"its shape has {self._count} {what}, got {got}")

    def _malformed(self, what: str) -> MalformedInput:
        return MalformedInput(f"input `{self._name[:NAME_MAX]}`: {what}", tensor=self._name)


def _is_cut(packed: memoryview, kind: int) -> bool:
    """Return whether packed numbers end within a number."""
    if kind == VARINT:
        return bool(packed) and packed[-1] >= 0x80
    return len(packed) % FIXED_BYTES[kind] > 0


def _varints(data: NDArray[np.uint8]) -> Iterator[NDArray[np.uint64]]:
    """Decode varints, `PIECE_BYTES` at a time; raise OverflowError if one is too long.

    CPU time: 5 to 45 ns each, by length. A Python loop takes 30 to 65 ns, the most for short ones,
    and a message holds more short ones.
    """
    begin = 0
    while begin < len(data):
        ends = np.flatnonzero(data[begin : begin + PIECE_BYTES] < 0x80) + begin
        if not len(ends):
            raise OverflowError
        starts = np.concatenate(([begin], ends[:-1] + 1))
        lengths = ends - starts + 1
        longest = int(lengths.max())
        if longest > NUMBER_BYTES_MAX:
            raise OverflowError
        values = (data[starts] & 0x7F).astype(np.uint64)
        for index in range(1, longest):
            longer = np.flatnonzero(lengths > index)
            more = (data[starts[longer] + index] & 0x7F).astype(np.uint64)
            values[longer] |= more << np.uint64(7 * index)
        yield values
        begin = int(ends[-1]) + 1


def _narrowed(values: NDArray[np.uint64], wide: str, narrow: str) -> bytes:
    """Convert integers to a datatype; raise OverflowError if one is out of range.

    Bits beyond the field's width are dropped, as in protobuf.
    """
    if narrow == "?":
        booleans: bytes = (values != 0).tobytes()
        return booleans
    read = values.astype(wide)
    elements = read.astype(narrow)
    if not np.array_equal(read, elements):
        raise OverflowError
    return elements.tobytes()
