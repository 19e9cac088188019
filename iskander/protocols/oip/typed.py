"""Typed contents: a tensor's elements as numbers and strings in the fields of a message.

They are taken from the bytes that came, without a runtime that would make a list of them first:
floating-point numbers lie there as they do in memory and are left where they are, whole numbers are
as long as each needs, strings are between their lengths.

Not compiled, on purpose: much of it is read by a thread, and compiled code would not let the loop
have the interpreter meanwhile.

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
from iskander.contract.strings import COLUMN_BYTES_MAX
from iskander.contract.tensors import Contract
from iskander.errors import LimitExceeded, MalformedInput
from iskander.protocols.oip.tensors import NOTHING, STRINGS, Described, strings_max, tensor_of
from iskander.protocols.oip.wire import FIXED_BYTES, I32, I64, LEN, VARINT, read_field
from iskander.protocols.tensors import NAME_MAX, Tensor

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
"""Fields of InferTensorContents by number: name, and kind of an element that is not packed."""


class _Field(NamedTuple):
    """Where a datatype's elements are.

    Attributes:
        number: Of the field.
        wide: NumPy type of the field's whole numbers; empty for what is no whole number.
        narrow: That of the datatype.
    """

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
"""In all typed contents of a request: strings, and numbers that are not packed. They take a thread
half a second."""
FIELDS_SPARE: Final = 16
"""More than elements: packed ones that are empty, and some that nobody knows."""
AT_ONCE: Final = 8192
"""So many fields take a few milliseconds; more are for a thread."""
AT_ONCE_BYTES: Final = 256 << 10
"""The same of packed whole numbers, and of what is put together."""
PIECE_BYTES: Final = 1 << 20
"""Numbers that are read together; their room is a multiple of that."""
NUMBER_BYTES_MAX: Final = 10

_BYTES: Final = {dtype.oip: max(dtype.arrow_bits // 8, 1) for dtype in DTYPES}
"""Of an element; strings have more beside that."""


def typed_tensors(
    described: Sequence[Described],
    typed: Mapping[int, memoryview],
    contract: Contract,
    limits: LimitsConfig,
) -> list[Tensor]:
    """Tensors whose elements came as typed contents; without them where they fit no input.

    Args:
        described: As `require_typed` lets them pass.
        typed: An InferTensorContents of each that has elements, by its place.
        contract: Of the model that they are for.
        limits: Of the server.

    Raises:
        MalformedInput: A datatype has no typed contents, or elements are in another one's field,
            out of its range, or not as many as the shape says.
        LimitExceeded: Strings, or numbers that are not packed, are more than is taken.
    """
    strings = strings_max(contract, limits)
    elements = max((spec.elements for spec in contract.inputs), default=0)
    left = FIELDS_MAX
    tensors = []
    for place, (name, datatype, shape) in enumerate(described):
        if place not in typed:
            tensors.append(tensor_of(name, datatype, shape, NOTHING, strings))
            continue
        reader = _Reader(name, datatype, prod(shape), typed[place], left)
        data = NOTHING
        if datatype == STRINGS:
            if prod(shape) <= strings:
                data = reader.strings()
        elif prod(shape[1:]) <= elements:
            data = reader.numbers()
        left = reader.left
        tensors.append(Tensor(name, datatype, shape, data))
    return tensors


def require_typed(described: Iterable[Described], limits: LimitsConfig) -> None:
    """Refuse typed contents that are too many by their shapes, before they are read.

    Raises:
        LimitExceeded: Rows or bytes.
    """
    described = list(described)
    for _, _, shape in described:
        if shape and shape[0] > limits.rows:
            raise LimitExceeded(
                f"a batch may have {limits.rows} rows, got {shape[0]}", wanted=limits.rows
            )
    total = typed_bytes(described)
    if total > limits.bytes:
        raise LimitExceeded(f"a batch may have {limits.bytes} bytes, got {total}")


def typed_bytes(described: Iterable[Described]) -> int:
    """Bytes of the elements of tensors by their shapes; of strings without their texts."""
    sizes = (max(prod(shape), 0) * _BYTES.get(datatype, 1) for _, datatype, shape in described)
    return sum(sizes)


def are_slow(described: Sequence[Described], typed: Mapping[int, memoryview]) -> bool:
    """Whether typed contents take so long to read that others would wait for it."""
    fields = size = 0
    for place, contents in typed.items():
        _, datatype, shape = described[place]
        if datatype not in FIELDS:
            continue
        is_packed = _is_packed(contents, FIELDS[datatype].number)
        if not is_packed:
            fields += min(len(contents) // 2, _fields_max(prod(shape)))
        if not is_packed or FIELDS[datatype].wide:
            size += len(contents)
    return fields > AT_ONCE or size > AT_ONCE_BYTES


def _is_packed(contents: memoryview, number: int) -> bool:
    """Whether all that there is are numbers in one piece."""
    try:
        key, _, end = read_field(contents, 0, len(contents))
    except (IndexError, MalformedInput):
        return False
    kind = CONTENTS[number][1]
    return kind != LEN and key == number << 3 | LEN and end == len(contents)


def _fields_max(count: int) -> int:
    """How many fields so many elements may be in."""
    return max(count, 0) + FIELDS_SPARE


class _Reader:
    """Reads one tensor's contents.

    Args:
        name: Of the tensor.
        datatype: As the protocol names it.
        count: Elements by the tensor's shape.
        contents: An InferTensorContents.
        left: Fields that it may have, beside what its count lets it have.

    Raises:
        MalformedInput: The datatype has no typed contents.

    Attributes:
        left: What it left of these.
    """

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
        """Numbers in the raw form; a copy of whole ones only, and of what is in pieces."""
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
            raise self._malformed(f"there is a value that is no {self._datatype}") from None

    def strings(self) -> memoryview:
        """Strings in the form of `strings_to_body`; 0.4 us of CPU for each."""
        contents = self._contents
        if len(contents) > COLUMN_BYTES_MAX:
            raise LimitExceeded(f"the strings of a tensor may have {COLUMN_BYTES_MAX} bytes")
        texts, ends = bytearray(), array("i", [0])
        for begin, end in self._values():
            texts += contents[begin:end]
            ends.append(len(texts))
        self._require(len(ends) - 1, "strings")
        assert ends.itemsize == OFFSET_BYTES
        return memoryview(b"".join((ends, texts)))

    def _packed(self) -> memoryview:
        """The numbers' bytes: nearly always in one piece, which stays where it is."""
        first, joined, kind = NOTHING, bytearray(), CONTENTS[self._field.number][1]
        for begin, end in self._values():
            piece = self._contents[begin:end]
            if _is_cut(piece, kind):
                raise self._malformed("its typed contents are no message")
            if not first:
                first = piece
                continue
            joined += piece if joined else b"".join((first, piece))
        return memoryview(joined) if joined else first

    def _values(self) -> Iterator[tuple[int, int]]:
        """Where the values of the datatype's field are: each an element, or some of them packed."""
        contents, number = self._contents, self._field.number
        position, end, most = 0, len(contents), _fields_max(self._count)
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
                    f"the typed contents of a request may have {FIELDS_MAX} strings, and numbers "
                    "that are not packed; send raw bytes"
                )
            # Half the time for what there may be most of: short strings.
            if contents[position] == packed and position + 1 < end:
                length = contents[position + 1]
                if length < 0x80 and position + 2 + length <= end:
                    position += 2 + length
                    yield position - length, position
                    continue
            try:
                key, begin, position = read_field(contents, position, end)
            except (IndexError, MalformedInput):
                raise self._malformed("its typed contents are no message") from None
            found, found_kind = key >> 3, key & 7
            if found not in CONTENTS or found_kind not in (LEN, CONTENTS[found][1]):
                continue
            if found == number:
                yield begin, position
            elif begin < position:
                raise self._malformed(
                    f"{self._datatype} is in `{CONTENTS[number][0]}`, got `{CONTENTS[found][0]}`"
                )

    def _require(self, got: int, what: str) -> None:
        if self._count != got:
            raise self._malformed(f"its shape has {self._count} {what}, got {got}")

    def _malformed(self, what: str) -> MalformedInput:
        return MalformedInput(f"input `{self._name[:NAME_MAX]}`: {what}", tensor=self._name)


def _is_cut(packed: memoryview, kind: int) -> bool:
    """Whether packed numbers end within one."""
    if kind == VARINT:
        return bool(packed) and packed[-1] >= 0x80
    return len(packed) % FIXED_BYTES[kind] > 0


def _varints(data: NDArray[np.uint8]) -> Iterator[NDArray[np.uint64]]:
    """Whole numbers of any length, some at a time.

    5 to 45 ns of CPU each, by their length; as Python numbers 30 to 65, most where they are short
    and a message holds the most of them.

    Raises:
        OverflowError: One is longer than any is.
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
        for place in range(1, longest):
            longer = np.flatnonzero(lengths > place)
            more = (data[starts[longer] + place] & 0x7F).astype(np.uint64)
            values[longer] |= more << np.uint64(7 * place)
        yield values
        begin = int(ends[-1]) + 1


def _narrowed(values: NDArray[np.uint64], wide: str, narrow: str) -> bytes:
    """Whole numbers as elements of a datatype; what a field has no room for is cut off, as always.

    Raises:
        OverflowError: One does not fit.
    """
    if narrow == "?":
        are_set: bytes = (values != 0).tobytes()
        return are_set
    read = values.astype(wide)
    elements = read.astype(narrow)
    if not np.array_equal(read, elements):
        raise OverflowError
    return elements.tobytes()
