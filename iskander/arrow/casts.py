"""Numbers made into a tensor's type, and refused where they would not be the same numbers.

Whole numbers have to be exact in the new type. A float may be rounded to a narrower one, which is
all that narrower means, and may not become infinite. bfloat16 is the upper half of a float32, in a
uint16, as everywhere here.

Pure: NumPy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from iskander.errors import ContractError

UNIT_NS = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86_400 * 10**9,
}
BFLOAT16 = "bfloat16"
BFLOAT16_NAN = 0x7FC0
FLOAT64_EXACT = 1 << 53
BFLOAT16_EXACT = 256
"""Whole numbers up to this one are exact in every type of floats."""


class Values(NamedTuple):
    """Elements of a column.

    Shape:
        `(rows, ...)`, both.

    Attributes:
        data: As they were sent; whatever lies where there is no value.
        valid: Where there is a value; None: everywhere.
        is_bfloat16: The uint16 are halves of floats.
    """

    data: np.ndarray
    valid: np.ndarray | None = None
    is_bfloat16: bool = False


class ValueLocation(NamedTuple):
    """What elements are of, for errors.

    Attributes:
        column: Its name.
        rows: The row of the batch that each entry of the first axis is of; None: it is the row.
    """

    column: str
    rows: np.ndarray | None = None

    def row(self, bad: np.ndarray) -> int:
        """The row of the batch with the first bad element."""
        at = int(np.flatnonzero(bad)[0]) // max(bad.size // max(len(bad), 1), 1)
        return at if self.rows is None else int(self.rows[at])


def cast(values: Values, wanted: str, where: ValueLocation) -> np.ndarray:
    """Elements in another type; zero where there is no value.

    Args:
        values: Numbers or booleans.
        wanted: Name of the type, as in the table of types.
        where: For the error.

    Raises:
        ContractError: A value would not be the same; says which and in which row.
    """
    data = _zeroed(values)
    if values.is_bfloat16:
        if wanted == BFLOAT16:
            return data
        data = _from_bfloat16(data)
    is_half = wanted == BFLOAT16
    dtype = np.dtype(np.float32 if is_half else wanted)
    if data.dtype == dtype and not is_half:
        return data
    source = data.dtype.kind
    with np.errstate(over="ignore", invalid="ignore"):
        made = _to_bfloat16(data.astype(np.float32)) if is_half else data.astype(dtype)
        seen = _from_bfloat16(made) if is_half else made
        if source == "b":
            return made
        if dtype.kind == "b":
            bad = (data != 0) & (data != 1)
        elif dtype.kind == "f":
            is_lost = ~np.isfinite(seen)
            bad = is_lost & np.isfinite(data) if source == "f" else is_lost | _differs(data, seen)
        elif source == "f":
            low, high = _range(dtype)
            # As a float16 the ends of a wide type are infinite themselves.
            inside = np.isfinite(data) & (data >= low) & (data < high)
            bad = ~(inside & (np.trunc(data) == data))
        else:
            bad = _beyond(data, dtype)
    _refuse(bad, data, wanted, where)
    return made


def rescale(
    values: Values, multiply: int, divide: int, wanted: str, where: ValueLocation
) -> np.ndarray:
    """Whole numbers times `multiply` over `divide`, in another type; zero where there is no value.

    Exact where whole numbers are wanted, rounded where floats are.

    Raises:
        ContractError: A value would not be whole, or is too large; says which and in which row.
    """
    data = _zeroed(values).astype(np.int64)
    target = np.dtype(np.float32 if wanted == BFLOAT16 else wanted)
    if target.kind == "f":
        # Beyond 2**53 no float is exact; what is left over is, and is of the number's sign.
        rest = np.fmod(data, divide)
        is_exact = (data >= -FLOAT64_EXACT) & (data <= FLOAT64_EXACT)
        made = np.where(
            is_exact,
            data.astype(np.float64) * multiply / divide,
            ((data - rest) // divide).astype(np.float64) * multiply
            + rest.astype(np.float64) * multiply / divide,
        )
        return cast(Values(made, values.valid), wanted, where)
    whole, rest = np.divmod(data, divide)
    _refuse(rest != 0, data, f"{wanted} when divided by {divide}", where)
    bound = np.iinfo(np.int64).max // multiply
    _refuse((whole > bound) | (whole < -bound), data, f"int64 when times {multiply}", where)
    return cast(Values(whole * multiply, values.valid), wanted, where)


def constant(value: float | str, dtype_name: str) -> np.generic:
    """A fill or padding as an element of a type."""
    if dtype_name == BFLOAT16:
        return np.uint16(_to_bfloat16(np.array([value], np.float32))[0])
    made: np.generic = np.dtype(dtype_name).type(value)
    return made


def refuse_nulls(bad: np.ndarray, where: ValueLocation) -> None:
    """Refuse elements that are null.

    Raises:
        ContractError: There are some.
    """
    count = int(np.count_nonzero(bad))
    if count:
        raise ContractError(
            f"column `{where.column}` has {count} nulls, the first in row {where.row(bad)}, and "
            "the model's input cannot hold a null",
            column=where.column,
        )


def _zeroed(values: Values) -> np.ndarray:
    if values.valid is None:
        return values.data
    return np.where(values.valid, values.data, np.zeros((), values.data.dtype))


def _refuse(bad: np.ndarray, data: np.ndarray, wanted: str, where: ValueLocation) -> None:
    count = int(np.count_nonzero(bad))
    if count:
        found = data[bad][0]
        raise ContractError(
            f"column `{where.column}`: row {where.row(bad)} has {found}, which is no {wanted} "
            f"({count} of {bad.size} values)",
            column=where.column,
        )


def _range(dtype: np.dtype) -> tuple[float, float]:
    """The least value of a whole type, and the first one beyond it; both are exact as floats."""
    limits = np.iinfo(dtype)
    return float(limits.min), float(int(limits.max) + 1)


def _beyond(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Where a whole number is not in the range of another whole type."""
    limits, theirs = np.iinfo(dtype), np.iinfo(data.dtype)
    bad = np.zeros(data.shape, np.bool_)
    if theirs.max > limits.max:
        bad |= data > data.dtype.type(limits.max)
    if theirs.min < limits.min:
        bad |= data < data.dtype.type(limits.min)
    return bad


def _differs(data: np.ndarray, made: np.ndarray) -> np.ndarray:
    """Where a whole number is another one as a float; a long double holds both."""
    if not data.size or -BFLOAT16_EXACT <= data.min() <= data.max() <= BFLOAT16_EXACT:
        return np.zeros(data.shape, np.bool_)
    bad: np.ndarray = made.astype(np.longdouble) != data.astype(np.longdouble)
    return bad


def _from_bfloat16(data: np.ndarray) -> np.ndarray:
    return (data.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(data: np.ndarray) -> np.ndarray:
    """Rounded to the nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), np.uint32(BFLOAT16_NAN), rounded).astype(np.uint16)
