"""Tensors as Open Inference Protocol clients write them: typed contents, and strings in raw bytes.

The raw form of a tensor of strings has, for each element, its length in four bytes, little-endian,
and then its bytes; in the order of the elements.

Pure. Source: Open Inference Protocol v2, `InferTensorContents`; Triton's binary tensor data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from iskander.errors import MalformedInput

STRINGS = "BYTES"

FIELDS: dict[str, tuple[str, str]] = {
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "<i1"),
    "INT16": ("int_contents", "<i2"),
    "INT32": ("int_contents", "<i4"),
    "INT64": ("int64_contents", "<i8"),
    "UINT8": ("uint_contents", "<u1"),
    "UINT16": ("uint_contents", "<u2"),
    "UINT32": ("uint_contents", "<u4"),
    "UINT64": ("uint64_contents", "<u8"),
    "FP32": ("fp32_contents", "<f4"),
    "FP64": ("fp64_contents", "<f8"),
    STRINGS: ("bytes_contents", ""),
}
"""Field of InferTensorContents, and the elements' NumPy type; other datatypes are raw only."""

_LENGTH = struct.Struct("<I")


def raw_of(name: str, datatype: str, contents: Any) -> memoryview:  # noqa: ANN401
    """A tensor's typed contents in the raw form.

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
    field, dtype = FIELDS[datatype]
    others = [found.name for found, _ in contents.ListFields() if found.name != field]
    if others:
        raise MalformedInput(
            f"input `{name[:100]}`: {datatype} is in `{field}`, got `{others[0]}`", tensor=name
        )
    values = getattr(contents, field)
    if datatype == STRINGS:
        return memoryview(raw_strings(values))
    try:
        return memoryview(np.array(values, dtype).tobytes())
    except OverflowError:
        raise MalformedInput(
            f"input `{name[:100]}` has a value that is no {datatype}", tensor=name
        ) from None


def raw_strings(values: Iterable[bytes]) -> bytes:
    """Strings in the raw form."""
    pack = _LENGTH.pack
    return b"".join(chain.from_iterable((pack(len(value)), value) for value in values))


def split_strings(raw: memoryview, count: int) -> Sequence[memoryview]:
    """The strings of a raw form, without a copy.

    Args:
        raw: In single bytes.
        count: How many there are by the tensor's shape.

    Raises:
        MalformedInput: There are more or fewer, or the last one is cut short.
    """
    if count * _LENGTH.size > len(raw):
        raise MalformedInput(f"{count} strings take more than {len(raw)} bytes")
    strings: list[memoryview] = []
    position, end = 0, len(raw)
    for _ in range(count):
        if position + _LENGTH.size > end:
            raise MalformedInput(f"wanted {count} strings, the bytes end after {len(strings)}")
        (length,) = _LENGTH.unpack_from(raw, position)
        position += _LENGTH.size
        if length > end - position:
            raise MalformedInput(f"string {len(strings)} of {count} is cut short")
        strings.append(raw[position : position + length])
        position += length
    if position != end:
        raise MalformedInput(f"{end - position} bytes are left after {count} strings")
    return strings
