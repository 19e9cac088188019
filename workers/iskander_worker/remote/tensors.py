"""Conversion between arrays and tensors of the Open Inference Protocol, raw or typed.

In the raw form numbers are row-major and little-endian, a bfloat16 is two bytes, a boolean one
byte. A string follows its length, which has four bytes.

Pure. Source: Open Inference Protocol v2, tensor data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import prod
from typing import Any, Final

import numpy as np

from iskander.contract.dtypes import DTYPES, Dtype

BY_OIP: Final = {dtype.oip: dtype for dtype in DTYPES}
STRING_DATATYPE: Final = "BYTES"
TYPED_FIELDS: Final = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents",
    "INT32": "int_contents", "INT64": "int64_contents", "UINT8": "uint_contents",
    "UINT16": "uint_contents", "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", STRING_DATATYPE: "bytes_contents",
}  # fmt: skip
"""Field of `InferTensorContents` by datatype; other datatypes exist in raw form only."""
_LENGTH: Final = struct.Struct("<I")


def raw_of(array: np.ndarray) -> bytes | memoryview:
    """Return the raw form of an array: a view, or new bytes for strings and strided arrays."""
    if array.dtype == np.object_:
        return b"".join(_with_lengths(array.reshape(-1)))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def array_of(raw: bytes | memoryview, dtype: Dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array of a raw form: a view, or objects of `str` for strings.

    Raises:
        ValueError: The bytes are not those of a tensor with this shape.
    """
    if dtype.oip == STRING_DATATYPE:
        return _decode_strings(_split_strings(raw, prod(shape)), shape)
    expected = prod(shape) * np.dtype(dtype.numpy).itemsize
    if len(raw) != expected:
        raise ValueError(f"it has {len(raw)} bytes, and its shape needs {expected}")
    return np.frombuffer(raw, dtype.numpy).reshape(shape)


def array_of_typed(contents: Any, dtype: Dtype, shape: tuple[int, ...]) -> np.ndarray:  # noqa: ANN401
    """Return an array of an `InferTensorContents` message.

    Raises:
        ValueError: The datatype has no typed form, or the values do not fit it or the shape.
    """
    field = TYPED_FIELDS.get(dtype.oip)
    if field is None:
        raise ValueError(f"{dtype.oip} has no typed form, only a raw one")
    values = getattr(contents, field)
    if len(values) != prod(shape):
        raise ValueError(f"it has {len(values)} values, and its shape needs {prod(shape)}")
    if dtype.oip == STRING_DATATYPE:
        return _decode_strings(values, shape)
    try:
        return np.array(values, dtype.numpy).reshape(shape)
    except OverflowError as error:
        raise ValueError(str(error)) from None


def _with_lengths(texts: Iterable[str]) -> Iterable[bytes]:
    for text in texts:
        encoded = text.encode()
        yield _LENGTH.pack(len(encoded))
        yield encoded


def _split_strings(raw: bytes | memoryview, count: int) -> list[bytes]:
    strings: list[bytes] = []
    at, end = 0, len(raw)
    while at < end and len(strings) < count:
        if end - at < _LENGTH.size:
            raise ValueError(f"a length is incomplete at byte {at} of {end}")
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if length > end - at:
            raise ValueError(f"a string of {length} bytes is incomplete at byte {at} of {end}")
        strings.append(bytes(raw[at : at + length]))
        at += length
    if at < end or len(strings) < count:
        raise ValueError(f"it has {len(strings)} strings in {at} of {end} bytes, expected {count}")
    return strings


def _decode_strings(strings: Iterable[bytes], shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of `str`; raise ValueError for bytes that are not UTF-8."""
    array = np.empty(prod(shape), np.object_)
    array[:] = [string.decode() for string in strings]
    return array.reshape(shape)
