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
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from iskander.config import LimitsConfig
from iskander.contract.dtypes import DTYPES, OFFSET_BYTES
from iskander.contract.strings import COLUMN_BYTES_MAX
from iskander.contract.tensors import Contract
from iskander.errors import LimitExceeded, MalformedInput
from iskander.gateway.frontends.oip_tensors import NAME_MAX, STRINGS, strings_max
from iskander.gateway.frontends.oip_wire import FIXED_BYTES, I32, I64, LEN, VARINT, read_field
from iskander.gateway.offered import Tensor


class _Field(NamedTuple):
    """Where a datatype's elements are.

    Attributes:
        number: Of the field.
        kind: Of an element that is not packed with others.
        dtype: NumPy type of whole numbers; empty for elements that stay as they are.
    """

    number: int
    kind: int
    dtype: str = ""


NAMES: Final = {
    1: "bool_contents",
    2: "int_contents",
    3: "int64_contents",
    4: "uint_contents",
    5: "uint64_contents",
    6: "fp32_contents",
    7: "fp64_contents",
    8: "bytes_contents",
}
"""Fields of InferTensorContents."""

FIELDS: Final = {
    "BOOL": _Field(1, VARINT, "?"),
    "INT8": _Field(2, VARINT, "<i1"),
    "INT16": _Field(2, VARINT, "<i2"),
    "INT32": _Field(2, VARINT, "<i4"),
    "INT64": _Field(3, VARINT, "<i8"),
    "UINT8": _Field(4, VARINT, "<u1"),
    "UINT16": _Field(4, VARINT, "<u2"),
    "UINT32": _Field(4, VARINT, "<u4"),
    "UINT64": _Field(5, VARINT, "<u8"),
    "FP32": _Field(6, I32),
    "FP64": _Field(7, I64),
    STRINGS: _Field(8, LEN),
}
"""Other datatypes have raw contents only."""

AT_ONCE_BYTES: Final = 256 << 10
"""So many bytes of whole numbers take a few milliseconds; more are for a thread."""
PIECE_BYTES: Final = 1 << 20
"""Numbers that are read together; their room is a multiple of that."""
NUMBER_BYTES_MAX: Final = 10
FIELD_MAX: Final = (1 << 29) - 1

_BYTES: Final = {dtype.oip: max(dtype.arrow_bits // 8, 1) for dtype in DTYPES}
"""Of an element; strings have more beside that."""


def typed_tensor(
    name: str,
    datatype: str,
    shape: tuple[int, ...],
    contents: memoryview,
    contract: Contract,
    limits: LimitsConfig,
) -> Tensor:
    """A tensor whose elements came as typed contents; without them where it fits no input.

    Args:
        name: Of the tensor.
        datatype: As the protocol names it.
        shape: As it was said.
        contents: An InferTensorContents.
        contract: Of the model that it is for.
        limits: Of the server: strings, and numbers that are not packed, as many as rows.

    Raises:
        MalformedInput: The datatype has no typed contents, the elements are in another one's field,
            out of its range, or not as many as the shape says.
        LimitExceeded: Strings, or numbers that are not packed, are more than is taken.
    """
    if datatype not in FIELDS:
        raise MalformedInput(
            f"input `{name[:NAME_MAX]}`: {datatype[:20]} has no typed contents, send its raw bytes",
            tensor=name,
        )
    reader = _Reader(name, datatype, contents, limits.rows)
    if datatype == STRINGS:
        is_fit = prod(shape) <= strings_max(contract, limits)
        read = reader.strings
    else:
        is_fit = prod(shape[1:]) <= max((spec.elements for spec in contract.inputs), default=0)
        read = reader.numbers
    return Tensor(name, datatype, shape, read(prod(shape)) if is_fit else memoryview(b""))


def require_typed(
    described: Iterable[tuple[str, str, tuple[int, ...]]], limits: LimitsConfig
) -> None:
    """Refuse typed contents that are too many by their shapes, before they are read.

    Args:
        described: Name, datatype and shape of each tensor.
        limits: Of the server.

    Raises:
        LimitExceeded: Rows or bytes.
    """
    total = 0
    for _, datatype, shape in described:
        if shape and shape[0] > limits.rows:
            raise LimitExceeded(
                f"a batch may have {limits.rows} rows, got {shape[0]}", wanted=limits.rows
            )
        total += max(prod(shape), 0) * _BYTES.get(datatype, 1)
    if total > limits.bytes:
        raise LimitExceeded(f"a batch may have {limits.bytes} bytes, got {total}")


def are_slow(
    described: list[tuple[str, str, tuple[int, ...]]], typed: Mapping[int, memoryview]
) -> bool:
    """Whether there are so many whole numbers that others would wait for them.

    Args:
        described: Name, datatype and shape of each tensor.
        typed: Typed contents, by the number of the tensor.
    """
    return any(
        len(contents) > AT_ONCE_BYTES
        and described[number][1] in FIELDS
        and FIELDS[described[number][1]].kind == VARINT
        for number, contents in typed.items()
    )


class _Reader:
    """Reads one tensor's contents."""

    def __init__(self, name: str, datatype: str, contents: memoryview, fields_max: int) -> None:
        self._name = name
        self._datatype = datatype
        self._field = FIELDS[datatype]
        self._contents = contents
        self._fields_max = fields_max

    def numbers(self, count: int) -> memoryview:
        """So many numbers in the raw form; a copy of whole ones only, and of what is in pieces."""
        packed, kind = self._packed(), self._field.kind
        if kind != VARINT:
            self._require(count, len(packed) // FIXED_BYTES[kind], "elements")
            return packed
        data = np.frombuffer(packed, np.uint8)
        self._require(count, int(np.count_nonzero(data < 0x80)), "elements")
        dtype = self._field.dtype
        if dtype == "?" and not (data > 1).any():
            return packed
        try:
            return memoryview(b"".join(_narrowed(piece, dtype) for piece in _varints(data)))
        except OverflowError:
            raise MalformedInput(
                f"input `{self._name[:NAME_MAX]}` has a value that is no {self._datatype}",
                tensor=self._name,
            ) from None

    def strings(self, count: int) -> memoryview:
        """So many strings in the form of `strings_to_body`; 0.4 us of CPU for each."""
        contents = self._contents
        if len(contents) > COLUMN_BYTES_MAX:
            raise LimitExceeded(f"the strings of a tensor may have {COLUMN_BYTES_MAX} bytes")
        texts, ends = bytearray(), array("i", [0])
        for begin, end in self._values():
            texts += contents[begin:end]
            ends.append(len(texts))
        self._require(count, len(ends) - 1, "strings")
        assert ends.itemsize == OFFSET_BYTES
        return memoryview(b"".join((ends, texts)))

    def _packed(self) -> memoryview:
        """The numbers' bytes: nearly always in one piece, which stays where it is."""
        first, joined = memoryview(b""), bytearray()
        for begin, end in self._values():
            piece = self._contents[begin:end]
            if _is_cut(piece, self._field.kind):
                raise self._broken()
            if not first:
                first = piece
                continue
            joined += piece if joined else b"".join((first, piece))
        return memoryview(joined) if joined else first

    def _values(self) -> Iterator[tuple[int, int]]:
        """Where the values of the datatype's field are: each an element, or some of them packed."""
        contents, (number, kind, _) = self._contents, self._field
        position, end, left = 0, len(contents), self._fields_max
        plain = number << 3 | LEN
        while position < end:
            left -= 1
            # Half the time for what there may be most of: short strings.
            if contents[position] == plain and position + 1 < end and left >= 0:
                length = contents[position + 1]
                if length < 0x80 and position + 2 + length <= end:
                    position += 2 + length
                    yield position - length, position
                    continue
            try:
                key, begin, position = read_field(contents, position, end)
            except (IndexError, MalformedInput):
                raise self._broken() from None
            if left < 0:
                raise LimitExceeded(
                    f"input `{self._name[:NAME_MAX]}`: typed contents may have {self._fields_max} "
                    "strings, or numbers that are not packed; send raw bytes"
                )
            found = key >> 3
            if not 0 < found <= FIELD_MAX:
                raise self._broken()
            if found == number:
                if key & 7 in (kind, LEN):
                    yield begin, position
            elif found in NAMES and begin < position:
                raise MalformedInput(
                    f"input `{self._name[:NAME_MAX]}`: {self._datatype} is in `{NAMES[number]}`, "
                    f"got `{NAMES[found]}`",
                    tensor=self._name,
                )

    def _require(self, wanted: int, got: int, what: str) -> None:
        if wanted != got:
            raise MalformedInput(
                f"input `{self._name[:NAME_MAX]}` has {wanted} {what} by its shape, got {got}",
                tensor=self._name,
            )

    def _broken(self) -> MalformedInput:
        return MalformedInput(
            f"the typed contents of input `{self._name[:NAME_MAX]}` are no message",
            tensor=self._name,
        )


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


def _narrowed(values: NDArray[np.uint64], dtype: str) -> bytes:
    """Numbers as elements of a datatype; those that are negative came as 64 bits.

    Raises:
        OverflowError: One does not fit.
    """
    if dtype == "?":
        are_set: bytes = (values != 0).tobytes()
        return are_set
    wide = values.view(np.int64) if dtype[1] == "i" else values
    narrow = wide.astype(dtype)
    if not np.array_equal(wide, narrow):
        raise OverflowError
    return narrow.tobytes()
