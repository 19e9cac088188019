"""Checked casts of column values to a tensor's element type.

Integers must be exact in the new type. Floats may be rounded to a narrower float, but must not
become infinite. A bfloat16 is the upper half of a float32, stored in a uint16.

Pure: NumPy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from iskander.contract.bfloat16 import round_to_bfloat16
from iskander.errors import ContractError

UNIT_NS = dict(ns=1, us=10**3, ms=10**6, s=10**9, m=60 * 10**9, h=3600 * 10**9, d=86_400 * 10**9)
BFLOAT16 = "bfloat16"
FLOAT64_EXACT = 1 << 53
BFLOAT16_EXACT = 256
"""Integers up to this value are exact in every float type."""


class Values(NamedTuple):
    """Elements of a column; `data` is undefined and `valid` False where null.

    Shape:
        `(rows, ...)`, both.
    """

    data: np.ndarray
    valid: np.ndarray | None = None
    is_bfloat16: bool = False


class ValueLocation(NamedTuple):
    """Name of the elements' column, for errors.

    `rows` maps entries of the first axis to batch rows.
    """

    column: str
    rows: np.ndarray | None = None

    def row(self, bad: np.ndarray) -> int:
        """Return the batch row of the first element that is set in `bad`."""
        row_size = max(bad.size // max(len(bad), 1), 1)
        entry = int(np.flatnonzero(bad)[0]) // row_size
        return entry if self.rows is None else int(self.rows[entry])


def cast_values(values: Values, dtype_name: str, location: ValueLocation) -> np.ndarray:
    """Cast numbers or booleans, or raise a ContractError; nulls become zero."""
    data = _nulls_as_zero(values)
    if values.is_bfloat16:
        if dtype_name == BFLOAT16:
            return data
        data = _from_bfloat16(data)
    is_bf16_target = dtype_name == BFLOAT16
    dtype = np.dtype(np.float32 if is_bf16_target else dtype_name)
    if data.dtype == dtype and not is_bf16_target:
        return data
    source_kind = data.dtype.kind
    with np.errstate(over="ignore", invalid="ignore"):
        result = round_to_bfloat16(data) if is_bf16_target else data.astype(dtype)
        decoded = _from_bfloat16(result) if is_bf16_target else result
        if source_kind == "b":
            return result
        if dtype.kind == "b":
            bad = (data != 0) & (data != 1)
        elif dtype.kind == "f":
            bad = ~np.isfinite(decoded)
            bad = (
                bad & np.isfinite(data)
                if source_kind == "f"
                else bad | _changed_by_cast(data, decoded)
            )
        elif source_kind == "f":
            limits = np.iinfo(dtype)
            # Both bounds are exact as floats. In float16, the bounds of a wide type are infinite.
            low, high = float(limits.min), float(int(limits.max) + 1)
            inside = np.isfinite(data) & (data >= low) & (data < high)
            bad = ~(inside & (np.trunc(data) == data))
        else:
            bad = _out_of_range(data, dtype)
    _reject(bad, data, f"{dtype_name} cannot represent", location)
    return result


def rescale(
    values: Values, multiply: int, divide: int, dtype_name: str, location: ValueLocation
) -> np.ndarray:
    """Multiply integers by `multiply / divide` and cast them; nulls become zero.

    Float results are rounded; integer results must be exact.
    """
    data = _nulls_as_zero(values).astype(np.int64)
    target = np.dtype(np.float32 if dtype_name == BFLOAT16 else dtype_name)
    if target.kind == "f":
        # Above 2**53 floats are not exact: quotient and remainder are converted apart.
        rest = np.fmod(data, divide)
        is_exact = (data >= -FLOAT64_EXACT) & (data <= FLOAT64_EXACT)
        scaled = np.where(
            is_exact,
            data.astype(np.float64) * multiply / divide,
            ((data - rest) // divide).astype(np.float64) * multiply
            + rest.astype(np.float64) * multiply / divide,
        )
        return cast_values(Values(scaled, values.valid), dtype_name, location)
    whole, rest = np.divmod(data, divide)
    _reject(rest != 0, data, f"{dtype_name} cannot represent a quotient by {divide} of", location)
    bound = np.iinfo(np.int64).max // multiply
    is_large = (whole > bound) | (whole < -bound)
    _reject(is_large, data, f"int64 cannot represent {multiply} times", location)
    return cast_values(Values(whole * multiply, values.valid), dtype_name, location)


def cast_constant(value: float | str, dtype_name: str) -> np.generic:
    """Convert a fill or padding value to an element of a type."""
    if dtype_name == BFLOAT16:
        return np.uint16(round_to_bfloat16(np.array([value]))[0])
    element: np.generic = np.dtype(dtype_name).type(value)
    return element


def reject_nulls(is_null: np.ndarray, location: ValueLocation) -> None:
    """Raise a ContractError if any element is null."""
    count = int(np.count_nonzero(is_null))
    if count:
        row = location.row(is_null)
        raise ContractError(
            f"column `{location.column}` has {count} nulls, the first in row {row}; the model "
            "input does not accept nulls",
            column=location.column,
            row=row,
        )


def _nulls_as_zero(values: Values) -> np.ndarray:
    if values.valid is None:
        return values.data
    return np.where(values.valid, values.data, np.zeros((), values.data.dtype))


def _reject(bad: np.ndarray, data: np.ndarray, reason: str, location: ValueLocation) -> None:
    count = int(np.count_nonzero(bad))
    if count:
        row = location.row(bad)
        raise ContractError(
            f"column `{location.column}`: row {row} has {data[bad][0]}; {reason} "
            f"{count} of {bad.size} values",
            column=location.column,
            row=row,
        )


def _out_of_range(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the mask of integers outside the range of another integer type."""
    limits, source = np.iinfo(dtype), np.iinfo(data.dtype)
    bad = np.zeros(data.shape, np.bool_)
    if source.max > limits.max:
        bad |= data > data.dtype.type(limits.max)
    if source.min < limits.min:
        bad |= data < data.dtype.type(limits.min)
    return bad


def _changed_by_cast(data: np.ndarray, floats: np.ndarray) -> np.ndarray:
    """Return a mask of the integers that a conversion to float changed.

    A long double holds both numbers exactly.
    """
    if not data.size or -BFLOAT16_EXACT <= data.min() <= data.max() <= BFLOAT16_EXACT:
        return np.zeros(data.shape, np.bool_)
    bad: np.ndarray = floats.astype(np.longdouble) != data.astype(np.longdouble)
    return bad


def _from_bfloat16(data: np.ndarray) -> np.ndarray:
    return (data.astype(np.uint32) << 16).view(np.float32)
