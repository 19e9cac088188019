"""Named arrays as a record batch, and back: for models that speak Arrow.

    array (rows,)          a column of its type
    array (rows, a, b)     fixed_size_list<fixed_size_list<TYPE>[b]>[a]
    array of str           utf8

Numbers are not copied on the way in, and on the way out where their column has no gaps.

Runs on: worker main, of a model with workers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from iskander.errors import ExecutionFailed
from iskander_worker.backends import Arrays


def to_batch(arrays: Arrays) -> pa.RecordBatch:
    """A column for each array, under its name."""
    return pa.record_batch({name: _column(array) for name, array in arrays.items()})


def from_batch(batch: object, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of the wanted columns.

    Raises:
        ExecutionFailed: It is no record batch, a column is missing, has nulls, or is no tensor.
    """
    if not isinstance(batch, pa.RecordBatch):
        raise ExecutionFailed(
            f"predict returned a {type(batch).__name__}, wanted a pyarrow.RecordBatch"
        )
    names = batch.schema.names
    missing = [name for name in wanted if names.count(name) != 1]
    if missing:
        raise ExecutionFailed(
            f"predict returned the columns {', '.join(names)[:300]}, wanted {missing[0]} once"
        )
    return {name: _array(name, batch.column(name)) for name in wanted}


def _column(array: np.ndarray) -> pa.Array:
    if array.dtype == object:
        column = pa.array(array.reshape(-1), pa.utf8())
    elif array.dtype == np.bool_:
        column = pa.array(array.reshape(-1))
    else:
        values = np.ascontiguousarray(array).reshape(-1)
        kind = pa.from_numpy_dtype(values.dtype)
        column = pa.Array.from_buffers(kind, values.size, [None, pa.py_buffer(values)])
    for size in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _array(name: str, column: pa.Array) -> np.ndarray:
    shape = [len(column)]
    if isinstance(column, pa.FixedShapeTensorArray):
        shape += column.type.shape
        column = _whole(name, column.storage).flatten()
    while pa.types.is_fixed_size_list(column.type):
        shape.append(column.type.list_size)
        column = _whole(name, column).flatten()
    column, kind = _whole(name, column), column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        strings = np.empty(len(column), np.object_)
        strings[:] = column.to_pylist()
        return strings.reshape(shape)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ExecutionFailed(f"column `{name}` came as {kind}, which is no tensor")
    array: np.ndarray = column.to_numpy(zero_copy_only=False)
    return array.reshape(shape)


def _whole(name: str, column: pa.Array) -> pa.Array:
    if column.null_count:
        raise ExecutionFailed(f"column `{name}` has nulls, and no tensor can hold one")
    return column
