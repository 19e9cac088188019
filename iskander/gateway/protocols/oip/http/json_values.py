"""Tensor elements as JSON; types and ranges are checked.

A number such as `3.0` is an integer too, as JSON does not distinguish them.

Non-finite numbers are strings: "NaN", "Infinity", "-Infinity". Half precision has no JSON form in
the protocol. Strings are UTF-8.

Source: Open Inference Protocol v2, "Tensor Data"; ProtoJSON for numbers that are not finite.
"""

from __future__ import annotations

import math
from itertools import chain
from math import prod
from typing import Any

import msgspec
import numpy as np

from iskander.contract.column_types import RANK_MAX
from iskander.contract.processing.strings import body_to_strings, strings_to_body
from iskander.errors import ContractError, MalformedInput
from iskander.gateway.protocols.oip.http.json_bounds import (
    CHECKED_BYTES,
    PIECE_BYTES,
    InvalidStructure,
    pieces,
)
from iskander.gateway.protocols.oip.tensors import STRINGS
from iskander.gateway.protocols.tensors import Tensor

INTEGERS: dict[str, np.dtype[Any]] = {
    name: np.dtype(name.lower())
    for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
}
FLOATS: dict[str, np.dtype[Any]] = {"FP32": np.dtype("float32"), "FP64": np.dtype("float64")}
_WRITTEN = INTEGERS | FLOATS | {"BOOL": np.dtype("bool")}
BINARY_ONLY = ("FP16", "BF16")
NUMPY_ELEMENTS_MIN = 32
"""From this many elements on, numpy compares integers in half of the time."""
PIECE_ELEMENTS = 4096
"""Numbers that are encoded at once: half a millisecond."""
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_data(name: str, datatype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> bytes:
    """Convert a tensor's `data` in JSON to its bytes; the list is flat, or nested as the shape."""
    require_json_form(name, datatype)
    if datatype not in INTEGERS and datatype not in FLOATS and datatype not in ("BOOL", STRINGS):
        raise ContractError(f"input `{name}`: unknown datatype `{datatype[:20]}`", tensor=name)
    lists = [_decoded(name, raw, shape)] if len(raw) <= CHECKED_BYTES else pieces(raw, shape)
    try:
        if datatype in INTEGERS:
            return b"".join(_integers(flat, INTEGERS[datatype]) for flat in lists)
        if datatype in FLOATS:
            return b"".join(_floats(flat, FLOATS[datatype]) for flat in lists)
        if datatype == "BOOL":
            return b"".join(bytes(_of_type(flat, bool)) for flat in lists)
        return strings_to_body([text.encode() for flat in lists for text in _of_type(flat, str)])
    except _InvalidElement as error:
        why = f"{error.got} is not {datatype}{error.why}"
        raise ContractError(f"input `{name}`: {why}", tensor=name) from None
    except InvalidStructure:
        shown = ", ".join(map(str, shape[:RANK_MAX]))
        problem = f"`data` is neither a flat list of {min(prod(shape), 1 << 63)} elements nor"
        raise ContractError(
            f"input `{name}`: {problem} nested as the shape [{shown}]", tensor=name
        ) from None
    except MalformedInput as error:
        problem = f"`data` cannot be read: {error.message}"
        raise MalformedInput(f"input `{name}`: {problem}") from None


def _decoded(name: str, raw: bytes | memoryview, shape: tuple[int, ...]) -> list[Any]:
    """Decode a short text at once."""
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedInput(f"input `{name}`: `data` cannot be read: {error}") from None
    return _flattened(name, data, shape)


def require_json_form(name: str, datatype: str) -> None:
    """Raise ContractError for a datatype without a JSON form."""
    if datatype in BINARY_ONLY:
        raise ContractError(
            f"`{name}` is {datatype}, which has no JSON form: send or request it as binary data",
            tensor=name,
        )


def write_data(tensor: Tensor) -> msgspec.Raw:
    """Encode a tensor's elements as a flat list in JSON; raise if one has no JSON form.

    They are encoded in pieces: between two pieces, other threads continue.
    """
    name, datatype, data = tensor.name, tensor.datatype, tensor.data
    require_json_form(name, datatype)
    if datatype == STRINGS:
        count = prod(tensor.shape)
        texts = _texts(name, count, data)
        step = max(count * PIECE_BYTES // max(len(data), 1), 1)
        lists = (texts[at : at + step] for at in range(0, count, step))
    else:
        values: np.ndarray[Any, Any] = np.frombuffer(data, _WRITTEN[datatype])
        starts = range(0, len(values), PIECE_ELEMENTS)
        lists = (_numbers(values[at : at + PIECE_ELEMENTS], datatype) for at in starts)
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(each)[1:-1] for each in lists) + b"]")


def _numbers(values: np.ndarray[Any, Any], datatype: str) -> list[Any]:
    flat: list[Any] = values.tolist()
    if datatype in FLOATS:
        for index in np.flatnonzero(~np.isfinite(values)).tolist():
            value = flat[index]
            flat[index] = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return flat


class _InvalidElement(Exception):
    """An element of another type or range than its datatype."""

    def __init__(self, value: Any, why: str = "") -> None:  # noqa: ANN401
        super().__init__()
        self.got = f"a list of {len(value)}" if isinstance(value, list) else _quoted(value)
        self.why = why


def _quoted(value: Any) -> str:  # noqa: ANN401
    try:
        text = msgspec.json.encode(value[:40] if isinstance(value, str) else value).decode()
    except (msgspec.MsgspecError, OverflowError):
        text = "a number with many digits"
    return text[:60]


def _flattened(name: str, data: Any, shape: tuple[int, ...]) -> list[Any]:  # noqa: ANN401
    if not isinstance(data, list):
        raise ContractError(f"input `{name}`: `data` is not a list", tensor=name)
    flat: list[Any] = data
    if len(shape) > 1 and list in set(map(type, data)):
        flat = [data]
        for axis, size in enumerate(shape):
            wrong = [each for each in flat if not isinstance(each, list) or len(each) != size]
            if wrong:
                got = f"{len(wrong[0])} entries" if isinstance(wrong[0], list) else "an element"
                raise ContractError(
                    f"input `{name}`: nested `data` has {got} at axis {axis}, the shape has {size}",
                    tensor=name,
                )
            flat = list(chain.from_iterable(flat))
    count = prod(shape)
    if len(flat) != count:
        raise ContractError(
            f"input `{name}`: `data` has {len(flat)} elements, the shape has {min(count, 1 << 63)}",
            tensor=name,
        )
    return flat


def _of_type(flat: list[Any], *types: type) -> list[Any]:
    """Check the exact types of elements: a boolean is not an integer."""
    if not set(map(type, flat)) <= set(types):
        raise _InvalidElement(next(value for value in flat if type(value) not in types))
    return flat


def _integers(flat: list[Any], dtype: np.dtype[Any]) -> bytes:
    info = np.iinfo(dtype)
    if len(flat) >= NUMPY_ELEMENTS_MIN and set(map(type, flat)) == {int}:
        try:
            wide = np.array(flat, np.int64)
        except OverflowError:
            pass  # A number of uint64 above int64, or out of range.
        else:
            # An error is found below.
            if info.min <= int(wide.min()) and int(wide.max()) <= info.max:
                return wide.astype(dtype, copy=False).tobytes()
    if float in set(map(type, _of_type(flat, int, float))):
        for value in flat:
            if type(value) is float and not value.is_integer():
                raise _InvalidElement(value)
        flat = list(map(int, flat))
    if flat:
        for extreme in (min(flat), max(flat)):
            if not info.min <= extreme <= info.max:
                raise _InvalidElement(extreme, f": the range is {info.min} to {info.max}")
    return np.array(flat, dtype).tobytes()


def _floats(flat: list[Any], dtype: np.dtype[Any]) -> bytes:
    if str in set(map(type, flat)):
        flat = [NOT_FINITE.get(value, value) if type(value) is str else value for value in flat]
    try:
        wide = np.array(_of_type(flat, int, float), np.float64)
    except OverflowError:
        big = next(value for value in flat if type(value) is int and abs(value) > 10**308)
        raise _InvalidElement(big, ": out of range") from None
    with np.errstate(over="ignore"):
        values = wide.astype(dtype)
    beyond = np.flatnonzero(np.isinf(values) & np.isfinite(wide))
    if len(beyond):
        raise _InvalidElement(flat[int(beyond[0])], ": out of range")
    return values.tobytes()


def _texts(name: str, count: int, data: memoryview) -> list[Any]:
    texts: list[Any] = []
    for each in body_to_strings(data, count):
        try:
            texts.append(str(each, "utf-8"))
        except UnicodeDecodeError:
            raise ContractError(
                f"element {len(texts)} of `{name}` is not UTF-8, as JSON requires: request binary "
                "data",
                tensor=name,
            ) from None
    return texts
