"""Tensors as Open Inference Protocol clients write them: typed contents, and raw bytes.

Pure. Source: Open Inference Protocol v2, `InferTensorContents`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from iskander.config import LimitsConfig
from iskander.contract.dtypes import DTYPES
from iskander.contract.strings import strings_to_body
from iskander.contract.tensors import Contract
from iskander.errors import LimitExceeded, MalformedInput
from iskander.gateway.frontends.oip_strings import body_to_raw, raw_to_body
from iskander.gateway.offered import Tensor

STRINGS: Final = "BYTES"

FIELDS: dict[str, tuple[str, str]] = {
    "BOOL": ("bool_contents", ""),
    "INT8": ("int_contents", "<i1"),
    "INT16": ("int_contents", "<i2"),
    "INT32": ("int_contents", "<i4"),
    "INT64": ("int64_contents", "<i8"),
    "UINT8": ("uint_contents", "<u1"),
    "UINT16": ("uint_contents", "<u2"),
    "UINT32": ("uint_contents", "<u4"),
    "UINT64": ("uint64_contents", "<u8"),
    "FP32": ("fp32_contents", ""),
    "FP64": ("fp64_contents", ""),
    STRINGS: ("bytes_contents", ""),
}
"""Field of InferTensorContents, and the NumPy type of elements that are packed as numbers of any
length; the others are as they are, and other datatypes are raw only."""

PIECE_BYTES: Final = 1 << 20
"""Numbers that are read together; their room is a multiple of that."""

_BYTES: Final = {dtype.oip: max(dtype.arrow_bits // 8, 1) for dtype in DTYPES}
"""Of an element; strings have more beside that."""


def raw_of(name: str, datatype: str, contents: Any) -> memoryview:  # noqa: ANN401
    """A tensor's typed contents in the raw form; those of strings by `strings_of`.

    Args:
        name: Of the tensor.
        datatype: As the protocol names it.
        contents: An InferTensorContents.

    Raises:
        MalformedInput: The datatype has no typed contents, the elements are in another one's field,
            or one of them is out of range.
    """
    if datatype not in FIELDS:
        raise MalformedInput(
            f"input `{name[:100]}`: {datatype[:20]} has no typed contents, send its raw bytes",
            tensor=name,
        )
    dtype = FIELDS[datatype][1]
    _require_field(name, datatype, contents)
    contents.DiscardUnknownFields()
    packed = _packed(contents.SerializeToString())
    if not dtype:
        return packed
    try:
        return memoryview(b"".join(_narrowed(piece, dtype) for piece in _varints(packed)))
    except OverflowError:
        raise MalformedInput(
            f"input `{name[:100]}` has a value that is no {datatype}", tensor=name
        ) from None


def strings_of(name: str, contents: Any) -> Sequence[bytes]:  # noqa: ANN401
    """The strings of a tensor's typed contents.

    Raises:
        MalformedInput: They are in another datatype's field.
    """
    _require_field(name, STRINGS, contents)
    strings: Sequence[bytes] = contents.bytes_contents
    return strings


def _require_field(name: str, datatype: str, contents: Any) -> None:  # noqa: ANN401
    field = FIELDS[datatype][0]
    others = [found.name for found, _ in contents.ListFields() if found.name != field]
    if others:
        raise MalformedInput(
            f"input `{name[:100]}`: {datatype} is in `{field}`, got `{others[0]}`", tensor=name
        )


def _packed(message: bytes) -> memoryview:
    """The elements of a message whose only field is a packed one: behind its key and its length."""
    start = 1
    while start < len(message) and message[start] & 0x80:
        start += 1
    return memoryview(message)[start + 1 :]


def _varints(packed: memoryview) -> Iterator[NDArray[np.uint64]]:
    """The whole numbers of a packed field, some at a time.

    5 to 45 ns of CPU each, by their length; as Python numbers 30 to 65, most where they are short
    and a message holds the most of them.
    """
    data = np.frombuffer(packed, np.uint8)
    begin = 0
    while begin < len(data):
        ends = np.flatnonzero(data[begin : begin + PIECE_BYTES] < 0x80) + begin
        starts = np.concatenate(([begin], ends[:-1] + 1))
        lengths = ends - starts + 1
        values = (data[starts] & 0x7F).astype(np.uint64)
        for place in range(1, int(lengths.max())):
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
    wide = values.view(np.int64) if dtype[1] == "i" else values
    narrow = wide.astype(dtype)
    if not np.array_equal(wide, narrow):
        raise OverflowError
    return narrow.tobytes()


def are_named(names: Iterable[str], contract: Contract) -> bool:
    """Whether these are the contract's inputs, each once: if not, no element is worth a look."""
    got = list(names)
    return len(got) == len(contract.inputs) and set(got) == {
        spec.tensor for spec in contract.inputs
    }


def strings_max(contract: Contract, limits: LimitsConfig) -> int:
    """How many strings a tensor may have that some input of the contract could take."""
    elements = [spec.elements for spec in contract.inputs if spec.is_string]
    return limits.rows * max(elements, default=0)


def tensor_of(
    name: str, datatype: str, shape: tuple[int, ...], raw: memoryview, most: int
) -> Tensor:
    """A tensor whose elements came in the raw form.

    Args:
        name: Of the tensor.
        datatype: As the protocol names it.
        shape: As it was said.
        raw: Its elements.
        most: `strings_max`. One with more strings is left as it came, since it fits no contract.

    Raises:
        MalformedInput: It is of strings, and they are not as many as the shape says.
    """
    if datatype == STRINGS and prod(shape) <= most:
        try:
            raw = raw_to_body(raw, prod(shape))
        except MalformedInput as error:
            raise MalformedInput(f"tensor `{name[:100]}`: {error.message}") from None
    return Tensor(name, datatype, shape, raw)


def typed_tensor(
    name: str,
    datatype: str,
    shape: tuple[int, ...],
    contents: Any,  # noqa: ANN401
    contract: Contract,
    limits: LimitsConfig,
) -> Tensor:
    """The same of one whose elements came as typed contents; without them where it fits no input.

    Raises:
        MalformedInput: They are not in the datatype's field, out of its range, or not as many as
            the shape says.
        LimitExceeded: Strings are longer than offsets can say.
    """
    count = prod(shape)
    if datatype == STRINGS:
        strings = strings_of(name, contents)
        if count > strings_max(contract, limits):
            return Tensor(name, datatype, shape, memoryview(b""))
        _require_count(name, "strings", count, len(strings))
        return Tensor(name, datatype, shape, memoryview(strings_to_body(strings)))
    if prod(shape[1:]) > max((spec.elements for spec in contract.inputs), default=0):
        return Tensor(name, datatype, shape, memoryview(b""))
    if datatype in FIELDS:
        _require_field(name, datatype, contents)
        _require_count(name, "elements", count, len(getattr(contents, FIELDS[datatype][0])))
    return Tensor(name, datatype, shape, raw_of(name, datatype, contents))


def require_typed(
    described: Iterable[tuple[str, str, tuple[int, ...]]], limits: LimitsConfig
) -> None:
    """Refuse typed contents that are too many by their shapes, before they are made raw.

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


def _require_count(name: str, what: str, wanted: int, got: int) -> None:
    if wanted != got:
        raise MalformedInput(
            f"input `{name[:100]}` has {wanted} {what} by its shape, got {got}", tensor=name
        )


def raw_tensor(tensor: Tensor) -> memoryview:
    """A tensor's elements in the raw form."""
    if tensor.datatype == STRINGS:
        return body_to_raw(tensor.data, prod(tensor.shape))
    return tensor.data
