"""A tensor's elements as JSON, and back: types and ranges are checked, never guessed.

Numbers that are no JSON are written as text: "NaN", "Infinity", "-Infinity". Half precision has no
JSON form in the protocol. A string's bytes go as UTF-8.

Source: Open Inference Protocol v2, "Tensor Data"; ProtoJSON for numbers that are not finite.
"""

from __future__ import annotations

import math
from itertools import chain
from math import prod
from typing import Any

import msgspec
import numpy as np

from iskander.contract.strings import body_to_strings, strings_to_body
from iskander.errors import ContractError, MalformedInput
from iskander.protocols.oip.tensors import STRINGS
from iskander.protocols.tensors import Tensor

INTEGERS: dict[str, np.dtype[Any]] = {
    name: np.dtype(name.lower())
    for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
}
FLOATS: dict[str, np.dtype[Any]] = {"FP32": np.dtype("float32"), "FP64": np.dtype("float64")}
BINARY_ONLY = ("FP16", "BF16")
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_data(name: str, datatype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> bytes:
    """The bytes that a tensor's `data` stands for, as `offered.Tensor` has them.

    Args:
        name: Of the tensor, for errors.
        datatype: As the request says it.
        shape: The same; the data are one flat list of its elements, or nested as it says.
        raw: The JSON.

    Raises:
        ContractError: The elements are not of the datatype, or not as many as the shape has.
        MalformedInput: That is no JSON.
    """
    require_json_form(name, datatype)
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedInput(f"input `{name}`: `data` cannot be read: {error}") from None
    flat = _flattened(name, data, shape)
    try:
        if datatype in INTEGERS:
            return _integers(flat, INTEGERS[datatype])
        if datatype in FLOATS:
            return _floats(flat, FLOATS[datatype])
        if datatype == "BOOL":
            return _booleans(flat)
        if datatype == STRINGS:
            return _strings(flat)
    except _Misfit as misfit:
        raise ContractError(
            f"input `{name}`: {misfit.got} is no {datatype}{misfit.why}", tensor=name
        ) from None
    raise ContractError(f"input `{name}`: there is no datatype `{datatype[:20]}`", tensor=name)


def require_json_form(name: str, datatype: str) -> None:
    """Refuse a tensor whose elements JSON cannot hold.

    Raises:
        ContractError: Says what to do instead.
    """
    if datatype in BINARY_ONLY:
        raise ContractError(
            f"`{name}` is {datatype}, which has no JSON form: send it, or ask for it, as binary "
            "data",
            tensor=name,
        )


def write_data(tensor: Tensor) -> list[Any]:
    """A tensor's elements as a flat list for JSON, row by row.

    Raises:
        ContractError: They have no JSON form; says which.
    """
    name, datatype, data = tensor.name, tensor.datatype, tensor.data
    require_json_form(name, datatype)
    if datatype == STRINGS:
        return _texts(name, prod(tensor.shape), data)
    if datatype == "BOOL":
        booleans: list[Any] = np.frombuffer(data, np.bool_).tolist()
        return booleans
    if datatype in INTEGERS:
        integers: list[Any] = np.frombuffer(data, INTEGERS[datatype]).tolist()
        return integers
    values: np.ndarray[Any, Any] = np.frombuffer(data, FLOATS[datatype])
    flat: list[Any] = values.tolist()
    for index in np.flatnonzero(~np.isfinite(values)).tolist():
        value = float(values[index])
        flat[index] = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return flat


class _Misfit(Exception):
    """An element that is not what its datatype says."""

    def __init__(self, value: Any, why: str = "") -> None:  # noqa: ANN401
        super().__init__()
        is_text = isinstance(value, str)
        self.got = f"a list of {len(value)}" if isinstance(value, list) else _quoted(value, is_text)
        self.why = why


def _quoted(value: Any, is_text: bool) -> str:  # noqa: ANN401
    try:
        text = msgspec.json.encode(value[:40] if is_text else value).decode()
    except (msgspec.MsgspecError, OverflowError):
        text = "a number of many digits"
    return text[:60]


def _flattened(name: str, data: Any, shape: tuple[int, ...]) -> list[Any]:  # noqa: ANN401
    if not isinstance(data, list):
        raise ContractError(f"input `{name}`: `data` is no list", tensor=name)
    flat: list[Any] = data
    if len(shape) > 1 and list in set(map(type, data)):
        level: list[Any] = [data]
        for axis, size in enumerate(shape):
            wrong = [each for each in level if not isinstance(each, list) or len(each) != size]
            if wrong:
                got = f"{len(wrong[0])} entries" if isinstance(wrong[0], list) else "an element"
                raise ContractError(
                    f"input `{name}`: nested `data` has {got} where the shape has {size} at axis "
                    f"{axis}",
                    tensor=name,
                )
            level = list(chain.from_iterable(level))
        flat = level
    wanted = prod(shape)
    if len(flat) != wanted:
        raise ContractError(
            f"input `{name}`: its shape has {min(wanted, 1 << 63)} elements and its `data` "
            f"{len(flat)}",
            tensor=name,
        )
    return flat


def _require_types(flat: list[Any], wanted: set[type]) -> set[type]:
    """The types of the elements; a boolean is no integer here, whatever Python says."""
    kinds = set(map(type, flat))
    if not kinds <= wanted:
        raise _Misfit(next(value for value in flat if type(value) not in wanted))
    return kinds


def _integers(flat: list[Any], dtype: np.dtype[Any]) -> bytes:
    if float in _require_types(flat, {int, float}):
        broken = [value for value in flat if type(value) is float and not value.is_integer()]
        if broken:
            raise _Misfit(broken[0])
        flat = list(map(int, flat))
    info = np.iinfo(dtype)
    if flat:
        for extreme in (min(flat), max(flat)):
            if not info.min <= extreme <= info.max:
                raise _Misfit(extreme, f", which goes from {info.min} to {info.max}")
    return np.array(flat, dtype).tobytes()


def _floats(flat: list[Any], dtype: np.dtype[Any]) -> bytes:
    if str in set(map(type, flat)):
        flat = [NOT_FINITE.get(value, value) if type(value) is str else value for value in flat]
    _require_types(flat, {int, float})
    try:
        wide = np.array(flat, np.float64)
    except OverflowError:
        big = next(value for value in flat if type(value) is int and abs(value) > 10**308)
        raise _Misfit(big, ", it is out of range") from None
    with np.errstate(over="ignore"):
        values = wide.astype(dtype)
    beyond = np.flatnonzero(np.isinf(values) & np.isfinite(wide))
    if len(beyond):
        raise _Misfit(flat[int(beyond[0])], ", it is out of range")
    return values.tobytes()


def _booleans(flat: list[Any]) -> bytes:
    _require_types(flat, {bool})
    return bytes(flat)


def _strings(flat: list[Any]) -> bytes:
    _require_types(flat, {str})
    return strings_to_body([text.encode() for text in flat])


def _texts(name: str, count: int, data: memoryview) -> list[Any]:
    texts: list[Any] = []
    for each in body_to_strings(data, count):
        try:
            texts.append(str(each, "utf-8"))
        except UnicodeDecodeError:
            raise ContractError(
                f"element {len(texts)} of `{name}` is no UTF-8, which JSON takes: ask for binary "
                "data",
                tensor=name,
            ) from None
    return texts
